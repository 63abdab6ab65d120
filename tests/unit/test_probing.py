"""What may hang is asked for an answer in time."""

from __future__ import annotations

import threading
import time

import pytest
from django.db import DEFAULT_DB_ALIAS, connections

from kjo_django.probing import answer_within


def test_the_answer_is_returned_and_an_error_raised():
    def refuse() -> None:
        raise LookupError("not here")

    assert answer_within(60, lambda: None) is None
    with pytest.raises(LookupError, match="not here"):
        answer_within(60, refuse)


def test_who_hangs_is_not_waited_for():
    hangs = threading.Event()
    started = time.monotonic()
    try:
        with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
            answer_within(0.05, lambda: hangs.wait(60))
        assert time.monotonic() - started < 30
    finally:
        hangs.set()


@pytest.mark.usefixtures("real_database")
def test_the_connection_it_opened_is_closed():
    opened = []

    def ask() -> None:
        mine = connections[DEFAULT_DB_ALIAS]
        mine.ensure_connection()
        opened.append(mine)

    answer_within(60, ask)
    assert opened[0].connection is None
