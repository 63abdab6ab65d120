"""What a worker cannot do just now, and since when."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime

from django.utils import timezone

logger = logging.getLogger("kjo_django")


class Outages:
    """The errors of a worker's parts, each told once and kept until its part says that it is over.

    Thread-safe: parts note from threads of their own, each of its own source.

    :param on_error: told of each that is new: who met it, and what it is.
    """

    def __init__(self, on_error: Callable[[str, str], None]) -> None:
        self._on_error = on_error
        self._errors: dict[str, tuple[str, datetime]] = {}

    def note(self, source: str, error: str | None) -> None:
        """Note what a part has met, or with None that it works again."""
        if error is None:
            self._errors.pop(source, None)
        elif self._errors.get(source, ("",))[0] != error:
            logger.error("%s: %s", source, error)
            self._errors[source] = (error, timezone.now())
            self._on_error(source, error)

    @property
    def error(self) -> str:
        """That of the part that has had one for longest; empty where all work."""
        return next((error for error, _ in list(self._errors.values())), "")

    @property
    def began_at(self) -> datetime | None:
        """When that was first met."""
        return next((began_at for _, began_at in list(self._errors.values())), None)
