"""What template classes call that stands above them; the app fills it in when it is ready.

A producer makes sure of its topic, a consumer runs a worker, and both live in lower layers than
topics and workers do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


def _not_ready(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("kjo_django is not in INSTALLED_APPS, or django.setup() was not called")


@dataclass
class Above:
    """The calls upwards."""

    ensure_topics: Callable[[Sequence[str]], list[str]] = _not_ready
    make_worker: Callable[..., Any] = _not_ready
    status_of: Callable[[Any], dict[str, Any]] = _not_ready


above = Above()
