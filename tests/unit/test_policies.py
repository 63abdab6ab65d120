"""What operators asked of a queue's retries, and how attempts are judged by it."""

from __future__ import annotations

from datetime import timedelta

import pytest

from kjo_django.conf import get_settings
from kjo_django.engine import failures
from kjo_django.engine.admission import limit_of
from kjo_django.engine.attempt import Attempt, Delivery, Ending
from kjo_django.models import QueueControl
from kjo_django.registry import Handler, HandlerOptions
from kjo_django.retries import Backoff
from kjo_django.runtime import current_runtime
from kjo_django.transports.base import Record
from tests.unit.deliveries import Silent

HOUR = timedelta(hours=1)


@pytest.fixture(autouse=True)
def _forgotten():
    yield
    current_runtime().queue_controls.clear()


def ask(**limits) -> None:
    current_runtime().queue_controls["ledger"] = QueueControl(queue="ledger", **limits)


def failed(
    attempt: int, *, max_attempts: int = 3, options: HandlerOptions | None = None
) -> Attempt:
    handler = Handler(lambda: None, options or HandlerOptions("tests.fails"))
    queue = get_settings().queue("ledger")
    record = Record("ledger", 0, 0, None, b"", {})
    delivery = Delivery(record, Silent(), queue, "tests", None, handler)
    outcome = Attempt(delivery, number=attempt, limit=max_attempts)
    return failures.judge_error(current_runtime(), outcome, ValueError("no"))


@pytest.mark.parametrize(
    ("asked", "attempt", "result"),
    [
        (None, 2, Ending.RETRIED),
        (None, 3, Ending.DEAD),
        (5, 3, Ending.RETRIED),
        (5, 5, Ending.DEAD),
        (1, 1, Ending.DEAD),
        (2, 3, Ending.DEAD),
    ],
)
def test_the_limit_asked_goes_before_the_jobs_own(asked, attempt, result):
    ask(max_attempts=asked)
    outcome = failed(attempt)
    assert outcome.ending is result
    if result is Ending.DEAD:
        assert outcome.reason == "exhausted"


def test_a_limit_lowered_below_what_is_spent_still_grants_the_run_that_was_promised():
    ask(max_attempts=2)
    assert limit_of(current_runtime(), "ledger", own=9, spent=4) == 5
    assert limit_of(current_runtime(), "other", own=9, spent=4) == 9


def test_so_does_a_limit_that_is_taken_back():
    """Or the job would end as stalled, whose worker never died."""
    assert limit_of(current_runtime(), "ledger", own=3, spent=4) == 5


def test_the_back_off_asked_goes_before_the_settings_and_behind_the_handlers(settings):
    # Given
    settings.KJO = {**settings.KJO, "BACKOFF_BASE": 1, "BACKOFF_MAX": 60, "BACKOFF_JITTER": 0}
    own = HandlerOptions("tests.own", backoff=Backoff(timedelta(seconds=7), HOUR, 0))
    ask(backoff_base=600)
    handler = Handler(lambda: None, own)
    # Then
    runtime = current_runtime()
    assert failures.policy(runtime, None, "ledger").backoff.delay(1) == timedelta(minutes=10)
    assert failures.policy(runtime, None, "other").backoff.delay(1) == timedelta(seconds=1)
    assert failures.policy(runtime, handler, "ledger").backoff.delay(1) == timedelta(seconds=7)
