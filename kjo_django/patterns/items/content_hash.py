"""What content is told apart by: a hash over the fields that matter (KJO-F5, F6). Pure."""

from __future__ import annotations

import hashlib
from typing import Any

from kjo_django.messages.serializers import canonical_json

ALGORITHMS = ("sha256", "md5")


def content_hash(fields: Any, algorithm: str = "sha256") -> str:
    """Return the hex digest of the fields' canonical JSON: names and separators are part of it, so
    ``("1", "23")`` and ``("12", "3")`` differ, and the order of keys does not matter.

    :param algorithm: ``md5`` only to agree with producers that have always used it; it tells
        content apart, it proves nothing.
    :raises PayloadError: the fields cannot be written as JSON.
    """
    data = canonical_json(fields)
    if algorithm == "md5":
        return hashlib.md5(data, usedforsecurity=False).hexdigest()
    return hashlib.new(algorithm, data).hexdigest()
