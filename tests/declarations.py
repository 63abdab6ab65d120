"""What declaring handlers, queues and routes leaves behind in a process, undone after a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kjo_django import conf


@contextmanager
def forgetting(*stores: dict[Any, Any]) -> Iterator[None]:
    """Give the stores back what they held, and forget what queues were made of it."""
    before = [dict(store) for store in stores]
    try:
        yield
    finally:
        for store, was in zip(stores, before, strict=True):
            store.clear()
            store.update(was)
        conf._queue_cache.clear()
