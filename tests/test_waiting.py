"""What the tests wait with says what never came."""

from __future__ import annotations

import pytest

from tests.waiting import wait_until


def test_the_first_true_answer_is_returned() -> None:
    answers = iter([0, "", "ready"])
    assert wait_until(lambda: next(answers)) == "ready"


def test_what_never_comes_is_told_with_what_was_seen_last() -> None:
    seen = ["queued"]
    with pytest.raises(AssertionError) as error:
        wait_until(lambda: "completed" in seen, "the job ends", lambda: len(seen), patience=0)
    told = "Not within 0 s: the job ends\nlast answer: False\nseen: ['queued']\nstate: 1"
    assert str(error.value) == told


def test_a_condition_is_told_by_its_own_text() -> None:
    with pytest.raises(AssertionError, match="lambda: 1 > 2"):
        wait_until(lambda: 1 > 2, patience=0)


def test_errors_that_mean_not_yet_are_told() -> None:
    def ask() -> bool:
        raise ConnectionError("it is away")

    with pytest.raises(AssertionError, match="it is away"):
        wait_until(ask, patience=0, unless=(OSError,))
    with pytest.raises(ConnectionError):
        wait_until(ask, patience=0)
