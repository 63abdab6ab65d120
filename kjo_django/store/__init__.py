"""The statements of the hot path, one implementation for each kind of database."""

from __future__ import annotations

from functools import cache

from django.db import connections
from django.utils.module_loading import import_string

from kjo_django.store.base import Store

_STORES = {
    "mysql": "kjo_django.store.mysql.MySqlStore",
    "postgresql": "kjo_django.store.postgres.PostgresStore",
    "sqlite": "kjo_django.store.sqlite.SqliteStore",
}
"""Imported when a database is one of them."""


def store_for(alias: str) -> Store:
    """Return the store for a database's alias, which is made once."""
    return _make(connections[alias].vendor, alias)


@cache
def _make(vendor: str, alias: str) -> Store:
    kind: type[Store] = import_string(_STORES[vendor]) if vendor in _STORES else Store
    return kind(alias)


__all__ = ["Store", "store_for"]
