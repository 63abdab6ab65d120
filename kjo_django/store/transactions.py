"""Where jobs are written."""

from __future__ import annotations

from django.db import router

from kjo_django.conf import get_settings
from kjo_django.models.job import Job


def jobs_database() -> str:
    """Return the alias of the database that holds the jobs."""
    return get_settings().database or router.db_for_write(Job)
