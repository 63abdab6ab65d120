"""What enqueueing stored."""

from __future__ import annotations

from contextlib import contextmanager

from django.db import connection
from django.test.utils import CaptureQueriesContext

from kjo_django.models import Job, TransportMessage


def messages() -> list[TransportMessage]:
    return list(TransportMessage.objects.order_by("id"))


@contextmanager
def writing_nothing():
    """Whatever happens inside must not even try to write."""
    with CaptureQueriesContext(connection) as queries:
        yield
    assert not [q["sql"] for q in queries if not q["sql"].startswith("SELECT")]
    assert not Job.objects.exists()
    assert not messages()
