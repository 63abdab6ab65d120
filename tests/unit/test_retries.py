"""When and whether to try again: back-off, classification, policy and the seeds' other counts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from django.db import IntegrityError, InterfaceError, OperationalError
from django.utils import timezone
from hypothesis import assume, given
from hypothesis import strategies as st

from kjo_django import exceptions, retries
from kjo_django.conf import get_settings
from kjo_django.engine import failures
from kjo_django.engine.admission import limit_of
from kjo_django.engine.attempt import Attempt, Delivery, Ending
from kjo_django.exceptions import (
    CircuitBreakerOpenError,
    DatabaseConnectionError,
    JobTimeoutError,
    MessageError,
    PausableError,
    PayloadError,
    PermanentError,
    RateLimitExceededError,
    Retry,
    ServiceUnavailableError,
    StalledError,
)
from kjo_django.models import QueueControl
from kjo_django.registry import Handler, HandlerOptions
from kjo_django.retries import (
    Backoff,
    RetryPolicy,
    classify,
    error_class,
    import_path,
)
from kjo_django.runtime import current_runtime
from kjo_django.transports.base import Record
from tests.unit.deliveries import Silent

TICK = timedelta(microseconds=1)
durations = st.timedeltas(timedelta(milliseconds=1), timedelta(days=365))
shares = st.floats(0, 1)
attempts = st.integers(1, 10_000)

# --- Back-off -------------------------------------------------------------------------------------


@given(durations, durations, shares, attempts)
def test_the_delay_never_exceeds_the_cap(base, maximum, jitter, attempt):
    assert timedelta(0) <= Backoff(base, maximum, jitter).delay(attempt) <= maximum


@given(durations, durations, shares, attempts, shares)
def test_the_delay_never_falls_below_what_jitter_may_take(base, maximum, jitter, attempt, draw):
    # Given
    undisturbed = Backoff(base, maximum, 0).delay(attempt)
    # When
    delay = Backoff(base, maximum, jitter).delay(attempt, draw)
    # Then
    assert undisturbed * (1 - jitter) - TICK <= delay <= undisturbed


@given(durations, durations, attempts)
def test_the_undisturbed_delay_never_shrinks_from_attempt_to_attempt(base, maximum, attempt):
    backoff = Backoff(base, maximum, 0)
    assert backoff.delay(attempt) <= backoff.delay(attempt + 1)


@given(st.timedeltas(timedelta(milliseconds=1), timedelta(minutes=1)), st.integers(1, 20))
def test_the_undisturbed_delay_doubles_until_the_cap(base, attempt):
    backoff = Backoff(base, timedelta(days=10_000), 0)
    assert abs(backoff.delay(attempt + 1) - 2 * backoff.delay(attempt)) <= 2 * TICK


def test_a_thousandth_attempt_does_not_overflow():
    backoff = Backoff(timedelta(seconds=2), timedelta(minutes=10))
    assert backoff.delay(100_000, 0) == timedelta(minutes=10)


def test_without_a_given_draw_delays_differ_from_each_other():
    backoff = Backoff(timedelta(seconds=10), timedelta(minutes=10), 0.5)
    assert len({backoff.delay(1) for _ in range(50)}) > 10


# --- Classification -------------------------------------------------------------------------------


def named(name: str, *bases: type[Exception]) -> type[Exception]:
    """An exception of a foreign library that carries one of the known names."""
    return type(name, bases or (Exception,), {"__module__": "foreign.errors"})


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (ValueError("x"), "retry"),
        (Retry(), "retry"),
        (StalledError("x"), "retry"),
        (JobTimeoutError("x"), "retry"),
        (IntegrityError("x"), "retry"),
        (PermanentError("x"), "permanent"),
        (MessageError("invalid", "x"), "permanent"),
        (PayloadError("x"), "permanent"),
        (PausableError("x"), "pause"),
        (DatabaseConnectionError("x"), "pause"),
        (ServiceUnavailableError("x"), "pause"),
        (RateLimitExceededError("x"), "pause"),
        (CircuitBreakerOpenError("x"), "pause"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value,
)
def test_an_error_of_ours_has_its_verdict(error, verdict):
    assert classify(error) == verdict


@pytest.mark.parametrize("kind", [PermanentError, RateLimitExceededError])
def test_a_subclass_is_judged_as_its_parent(kind):
    """KJO-73: through the MRO."""

    class Special(kind):
        pass

    assert classify(Special("x")) == classify(kind("x"))


@pytest.mark.parametrize(
    "name",
    [
        "DatabaseConnectionError",
        "ServiceUnavailableError",
        "RateLimitExceededError",
        "CircuitBreakerOpenError",
    ],
)
def test_an_error_of_another_library_is_known_by_its_name_or_its_parents(name):
    kind = named(name)
    assert classify(kind("x")) == "pause"
    assert classify(named("TheirOwn", kind)("x")) == "pause"


def test_further_pausable_errors_are_named_by_import_path_or_by_name():
    kind = named("Throttled", named("HttpError"))
    assert classify(kind("x")) == "retry"
    for pausable in (["foreign.errors.Throttled"], ["Throttled"], ["foreign.errors.HttpError"]):
        assert classify(kind("x"), pausable) == "pause"
    assert classify(kind("x"), ["elsewhere.Throttled"]) == "retry"


def test_a_permanent_error_is_permanent_even_where_it_is_named_pausable():
    assert classify(PermanentError("x"), ["PermanentError"]) == "permanent"


@given(st.text(min_size=1).filter(str.isidentifier))
def test_a_name_nobody_knows_is_retried(name):
    assume(name not in dir(exceptions))
    assert classify(named(name)("x")) == "retry"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RateLimitExceededError("x"), "rate_limit"),
        (ServiceUnavailableError("x"), "network"),
        (CircuitBreakerOpenError("x"), "network"),
        (ConnectionRefusedError("x"), "network"),
        (ConnectionResetError("x"), "network"),
        (DatabaseConnectionError("x"), "database"),
        (OperationalError("x"), "database"),
        (InterfaceError("x"), "database"),
        (IntegrityError("x"), "default"),
        (ValueError("x"), "default"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value,
)
def test_an_error_has_its_class_of_recovery_delay(error, expected):
    """KJO-74, KJO-75."""
    assert error_class(error) == expected


def test_an_import_path_leaves_out_builtins():
    assert import_path(ValueError) == "ValueError"
    assert import_path(PermanentError) == "kjo_django.exceptions.PermanentError"


# --- Policy ---------------------------------------------------------------------------------------

SECONDS = {"rate_limit": 30, "network": 10, "database": 5, "default": 2}


def policy(**options) -> RetryPolicy:
    return RetryPolicy(Backoff(timedelta(seconds=1), timedelta(seconds=8), 0), SECONDS, **options)


def test_an_attempt_left_is_a_retry_and_the_last_one_is_exhausted():
    """X-7: one policy decides for every handler."""
    assert policy().decide(ValueError("x"), 4, 5).retry
    assert policy().decide(ValueError("x"), 5, 5) == retries.Decision(
        False, timedelta(0), None, "exhausted"
    )


@pytest.mark.parametrize("attempt", [1, 4])
def test_a_permanent_error_ends_at_the_first_attempt(attempt):
    """RST-25."""
    decision = policy().decide(PermanentError("x"), attempt, 5)
    assert (decision.retry, decision.reason, decision.pause) == (False, "fatal", None)


def test_the_class_of_the_error_is_the_floor_of_its_delay():
    """KJO-74, X-6."""
    assert policy().decide(ValueError("x"), 1, 9).delay == timedelta(seconds=2)
    assert policy().decide(OSError("x"), 4, 9).delay == timedelta(seconds=8)
    assert policy().decide(RateLimitExceededError("x"), 1, 9).delay == timedelta(seconds=30)


def test_a_pausable_error_rests_its_partition_for_the_class_delay():
    """KJO-76."""
    assert policy().decide(RateLimitExceededError("x"), 1, 9).pause == timedelta(seconds=30)
    assert policy().decide(ServiceUnavailableError("x"), 9, 9).pause == timedelta(seconds=10)
    assert policy().decide(ValueError("x"), 1, 9).pause is None


def test_a_retry_that_names_its_delay_gets_exactly_that():
    assert policy().decide(Retry(delay=timedelta(hours=3)), 1, 9).delay == timedelta(hours=3)
    assert policy().decide(Retry(delay=timedelta(0)), 1, 9).delay == timedelta(0)
    assert policy().decide(Retry(delay=-timedelta(1)), 1, 9).delay == timedelta(0)


@pytest.mark.parametrize(
    "decide",
    [
        lambda: policy().decide(Retry(delay=timedelta.max), 1, 9),
        lambda: RetryPolicy(Backoff(timedelta.max, timedelta.max)).decide(OSError(), 1, 9),
    ],
    ids=["asked for", "backed off"],
)
def test_no_delay_leads_beyond_the_calendar(decide):
    """A retry nobody can write down would never be settled."""
    assert timezone.now() + decide().delay < datetime(2100, 1, 1, tzinfo=UTC)


def test_a_retry_without_a_delay_backs_off_and_counts_like_any_attempt():
    """PJQ-51, X-6: retries are not immediate."""
    assert policy().decide(Retry(), 3, 9).delay == timedelta(seconds=4)
    assert not policy().decide(Retry(delay=timedelta(1)), 9, 9).retry


def test_a_delay_that_is_no_timedelta_is_refused_where_it_is_written():
    """Later there would be nobody to tell."""
    with pytest.raises(TypeError, match="delay must be a timedelta"):
        Retry("later", delay=5)


# --- what "3 attempts" means -----------------------------------------------------------------


def executions(max_attempts: int) -> int:
    """Run a job that always fails under the policy; count its executions."""
    attempt = 1
    while policy().decide(ValueError("x"), attempt, max_attempts).retry:
        attempt += 1
    return attempt


@given(st.integers(1, 50))
def test_max_attempts_counts_executions(max_attempts):
    assert executions(max_attempts) == max_attempts


# --- What operators asked of a queue's retries ----------------------------------------------------


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
