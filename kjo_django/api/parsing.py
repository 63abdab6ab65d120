"""The one format of bodies: JSON in UTF-8, of bounded size and depth, nothing else."""

from __future__ import annotations

import json
from typing import Any

from rest_framework.exceptions import ParseError
from rest_framework.parsers import BaseParser

from kjo_django.api.problems import TooLarge
from kjo_django.conf import get_settings

ROOM = 64 * 1024
"""Bytes a body may have beside its payload."""


DEEPEST = 200
"""Levels: what walks through a payload does so by recursion."""
TOO_DEEP = f"The body has more than {DEEPEST} levels."


def longest_body() -> int:
    """Return how many bytes a body may have: a payload that is allowed fits in, escaped too."""
    return 2 * get_settings().max_payload_bytes + ROOM


class StrictJSONParser(BaseParser):  # type: ignore[misc]
    """Refuses what is too long before it is read, and NaN, infinities and absurd nesting."""

    media_type = "application/json"

    def parse(self, stream: Any, media_type: Any = None, parser_context: Any = None) -> Any:
        """Return the decoded body.

        :raises TooLarge: it has more bytes than ``longest_body()``.
        :raises ParseError: it is no JSON.
        """
        limit = longest_body()
        body = stream.read(limit + 1)
        if len(body) > limit:
            raise TooLarge(f"The body has more than {limit} bytes.")
        try:
            value = json.loads(body.decode(), parse_constant=_refuse)
        except RecursionError:
            raise ParseError(TOO_DEEP) from None
        except ValueError as error:
            raise ParseError(f"The body is no JSON: {error}") from None
        if not _is_flat_enough(value):
            raise ParseError(TOO_DEEP)
        return value


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _is_flat_enough(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        level = [
            each
            for one in level
            if isinstance(one, dict | list)
            for each in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return True
    return False
