"""Where entries are, if there are several databases with jobs."""

from __future__ import annotations

from typing import Any

from kjo_django.runtime import jobs_database


class WithItsJob:
    """Sends an entry to the database of the job that adds it."""

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        return self.db_for_write(model)

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return jobs_database() if model._meta.app_label == "ledger" else None
