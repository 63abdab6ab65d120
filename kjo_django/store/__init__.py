"""The statements of the hot path, one implementation for each kind of database."""

from __future__ import annotations

from functools import cache

from django.db import connections

from kjo_django.store.base import Store
from kjo_django.store.mysql import MySqlStore
from kjo_django.store.postgres import PostgresStore
from kjo_django.store.sqlite import SqliteStore

_STORES: dict[str, type[Store]] = {
    "mysql": MySqlStore,
    "postgresql": PostgresStore,
    "sqlite": SqliteStore,
}


def store_for(alias: str) -> Store:
    """Return the store for a database's alias, which is made once."""
    return _make(connections[alias].vendor, alias)


@cache
def _make(vendor: str, alias: str) -> Store:
    return _STORES.get(vendor, Store)(alias)


__all__ = ["Store", "store_for"]
