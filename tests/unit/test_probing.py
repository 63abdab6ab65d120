"""What may hang is asked for an answer in time."""

from __future__ import annotations

import threading

import pytest
from django.db import DEFAULT_DB_ALIAS, connections

from kjo_django.probing import answer_within
from tests.waiting import PATIENCE


def test_the_answer_is_returned_and_an_error_raised():
    def refuse() -> None:
        raise LookupError("not here")

    assert answer_within(60, lambda: None) is None
    with pytest.raises(LookupError, match="not here"):
        answer_within(60, refuse)


def test_who_hangs_is_not_waited_for():
    hangs = threading.Event()
    try:
        with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
            answer_within(0.05, hangs.wait)
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


def test_while_a_question_is_open_it_is_not_asked_again():
    """A broker that is away for an hour is asked every few seconds: threads would pile up."""
    # Given
    asked, answered = [], threading.Event()

    def ask() -> str:
        asked.append("once")
        answered.wait(PATIENCE)
        return "the answer"

    try:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                answer_within(0.02, ask, share="question")
        assert asked == ["once"]
        # When it is answered after all
        threading.Timer(0.05, answered.set).start()
        # Then whoever waits then is told
        assert answer_within(60, ask, share="question") == "the answer"
        assert asked == ["once"]
    finally:
        answered.set()
    # And the next one asks anew
    assert answer_within(60, lambda: "another", share="question") == "another"


def test_questions_of_other_names_are_asked_side_by_side():
    assert answer_within(60, lambda: answer_within(60, lambda: 1, share="b"), share="a") == 1
