"""Counting beside other writers of a file of SQLite."""

import threading

import pytest
from django.db import connections

from kjo_django.ids import uuid7
from kjo_django.models import MetricBucket
from kjo_django.runtime import current_runtime
from kjo_django.worker import statistics as module
from kjo_django.worker.statistics import Statistics
from tests.ledger.models import Entry
from tests.unit.test_statistics import outcome


@pytest.mark.usefixtures("sqlite_file")
def test_counts_are_kept_though_another_writes_meanwhile(monkeypatch):
    """Who has read and then writes is refused at once, however long he would wait."""
    # Given rows that are read and added to
    statistics = Statistics(current_runtime(), uuid7())
    statistics.add([outcome()])
    statistics.flush()
    statistics.add([outcome()])

    # And a writer that comes in between
    def write() -> None:
        Entry.objects.create(job="j")
        connections.close_all()

    writer, add = threading.Thread(target=write), module._sum

    def add_beside_a_writer(left, right):
        if writer.ident is None:
            writer.start()
            writer.join(0.5)
        return add(left, right)

    monkeypatch.setattr(module, "_sum", add_beside_a_writer)
    # When
    statistics.flush()
    writer.join(30)
    # Then
    assert MetricBucket.objects.get().completed_count == 2
    assert Entry.objects.count() == 1
