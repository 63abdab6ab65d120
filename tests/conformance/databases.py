"""Further databases of one pytest session, beside whatever ``default`` is.

An alias is added to Django's connections after its test databases were set up, so that Django
neither renames nor wraps it: transactions here are real, and threads and processes share them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from django.db import connections

from kjo_django.models import (
    Lease,
    Mark,
    RateWindow,
    TransportMessage,
    TransportRun,
    TransportSubscription,
)

SQLITE = "kjo_sqlite_file"
POSTGRES = "kjo_postgres"
MARIADB = "kjo_mariadb"
MYSQL = "kjo_mysql"


def sqlite_settings(path: Path) -> dict[str, Any]:
    """Django's defaults for a SQLite file: rollback journal, 5 s of patience."""
    return {"ENGINE": "django.db.backends.sqlite3", "NAME": str(path)}


@contextmanager
def added_database(alias: str, settings: dict[str, Any]) -> Iterator[str]:
    """Register ``alias`` for a database that has this app's tables."""
    connections.settings[alias] = connections.configure_settings({"default": {}, alias: settings})[
        alias
    ]
    try:
        yield alias
    finally:
        connections[alias].close()
        del connections[alias]
        del connections.settings[alias]


def empty_tables(alias: str) -> None:
    for model in (TransportMessage, TransportRun, TransportSubscription, Lease, Mark, RateWindow):
        model.objects.using(alias).all().delete()
