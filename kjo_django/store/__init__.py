"""The statements of the hot path, one implementation for each kind of database."""

from __future__ import annotations

from kjo_django.store.base import Store


def store_for(alias: str) -> Store:
    """Return the store for a database's alias."""
    return Store(alias)


__all__ = ["Store", "store_for"]
