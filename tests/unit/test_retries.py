"""When and whether to try again: back-off, classification, policy and the seeds' other counts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from django.db import IntegrityError, InterfaceError, OperationalError
from django.utils import timezone
from hypothesis import assume, given
from hypothesis import strategies as st

from kjo_django import exceptions, exponential, job, registry, retries
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
from tests.unit.deliveries import NAMELESS, Silent

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


def test_what_is_no_delay_is_refused_where_it_is_written():
    """Later there would be nobody to tell."""
    with pytest.raises(TypeError, match="delay must be a timedelta"):
        Retry("later", delay="5")


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
    delivery = Delivery(record, Silent(), queue, "tests", NAMELESS, handler)
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
    runtime, plain = current_runtime(), Handler(lambda: None, HandlerOptions("tests.plain"))
    assert failures.policy(runtime, plain, "ledger").backoff.delay(1) == timedelta(minutes=10)
    assert failures.policy(runtime, plain, "other").backoff.delay(1) == timedelta(seconds=1)
    decision = failures.policy(runtime, handler, "ledger").decide(ValueError(), 1, 5)
    assert decision.delay == timedelta(seconds=7)


# --- What a job declares --------------------------------------------------------------------------


def declared(**options):
    """The policy of a job with these options of ``@job``, whose default delay is 2 seconds."""
    handler = job(name="tests.declared", **options)(lambda: None).handler
    registry.unregister("tests.declared")
    return failures.policy(current_runtime(), handler, "ledger")


@pytest.fixture
def _two_seconds(settings):
    settings.KJO = {**settings.KJO, "BACKOFF_BASE": 2, "BACKOFF_MAX": 60, "BACKOFF_JITTER": 0}


def delays(policy, count=4, error=None):
    decisions = (policy.decide(error or ValueError("x"), n + 1, 99) for n in range(count))
    return [decision.delay.total_seconds() for decision in decisions]


def test_each_form_of_a_jobs_back_off_gives_its_delays():
    assert delays(declared(backoff=exponential(2, max=10, jitter=0))) == [2, 4, 8, 10]
    assert delays(declared(backoff=30)) == [30] * 4
    assert delays(declared(backoff=timedelta(minutes=1))) == [60] * 4
    assert delays(declared(backoff=[1, 10, timedelta(minutes=1)])) == [1, 10, 60, 60]
    assert delays(declared(backoff=lambda attempt, error: 5 * attempt)) == [5, 10, 15, 20]
    assert delays(declared(backoff=0)) == [0] * 4


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"backoff": [1, 2, 3], "retry_on": ConnectionError}, [1, 2, 3, 3]),
        ({"backoff": exponential(1, max=4, jitter=0)}, [1, 2, 4, 4]),
        ({"backoff": lambda attempt, error: 1}, [1] * 4),
        ({"backoff": 0}, [0] * 4),
        ({"backoff": lambda attempt, error: None}, [10] * 4),
        ({}, [10] * 4),
    ],
)
def test_what_a_job_declares_goes_before_the_delay_of_the_class_of_error(
    options, expected, settings
):
    """It waited 10 seconds each time."""
    settings.KJO = {
        **settings.KJO,
        "BACKOFF_BASE": 1,
        "BACKOFF_JITTER": 0,
        "ERROR_RECOVERY_DELAYS": {"network": 10},
    }
    assert delays(declared(**options), error=ConnectionError("x")) == expected


def test_a_job_whose_error_pauses_its_partition_waits_until_that_goes_on(settings):
    settings.KJO = {**settings.KJO, "ERROR_RECOVERY_DELAYS": {"rate_limit": 10}}
    error = RateLimitExceededError("x")
    assert delays(declared(backoff=[1, 60]), error=error) == [10, 60, 60, 60]


def test_a_function_of_the_error_knows_which_error_it_was():
    policy = declared(backoff=lambda attempt, error: timedelta(seconds=error.args[0]))
    assert delays(policy, 1, ValueError(7)) == [7]


@pytest.mark.usefixtures("_two_seconds")
@pytest.mark.parametrize("answer", [None, -1, "soon", float("inf"), True, "raises"])
def test_a_back_off_that_answers_nonsense_counts_with_the_default_delay_and_says_so(answer, caplog):
    # Given
    def backoff(attempt, error):
        if answer == "raises":
            raise LookupError("no such tier")
        return answer

    error = ValueError("x")
    # When
    decision = declared(backoff=backoff).decide(error, 1, 5)
    # Then
    assert (decision.retry, decision.delay) == (True, timedelta(seconds=2))
    (note,) = error.__notes__
    assert note.startswith("The job's own back-off failed, the default one was taken: ")
    assert ("no such tier" if answer == "raises" else repr(answer)) in note
    assert note in caplog.text


class Refused(ConnectionError):
    """An error of a kind of its own."""


@pytest.mark.parametrize(
    ("options", "error", "retry"),
    [
        ({"retry_on": ConnectionError}, Refused(), True),
        ({"retry_on": (ConnectionError, KeyError)}, KeyError(), True),
        ({"retry_on": ConnectionError}, ValueError(), False),
        ({"retry_on": ConnectionError}, Retry(), True),
        ({"retry_on": ConnectionError}, RateLimitExceededError(), True),
        ({"retry_on": ConnectionError}, StalledError(), True),
        ({"give_up_on": ValueError}, ValueError(), False),
        ({"give_up_on": ValueError}, KeyError(), True),
        ({"give_up_on": RateLimitExceededError}, RateLimitExceededError(), False),
        ({"give_up_on": Exception}, StalledError(), True),
        ({"retry_on": OSError, "give_up_on": Refused}, Refused(), False),
        ({"retry_on": OSError, "give_up_on": Refused}, OSError(), True),
    ],
)
def test_a_job_says_after_which_errors_it_is_tried_again(options, error, retry):
    decision = declared(**options).decide(error, 1, 5)
    assert decision.retry is retry
    assert decision.reason == ("retry" if retry else "fatal")
    assert retry or decision.pause is None


# --- Retry-After ----------------------------------------------------------------------------------

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)


class Answer:
    """What an HTTP library gives of an answer."""

    def __init__(self, status: int, value: str | None) -> None:
        self.status_code = status
        self.headers = {} if value is None else {"Retry-After": value}

    def __bool__(self) -> bool:
        return False  # as that of requests, for an answer that is an error


class HttpError(Exception):
    """An HTTP library's error, which carries the answer."""

    def __init__(self, status: int, value: str | None = "20") -> None:
        super().__init__(f"status {status}")
        self.response = Answer(status, value)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("20", 20),
        (" 0 ", 0),
        ("Fri, 01 May 2026 12:00:45 GMT", 45),
        ("Fri, 01 May 2026 12:00:45 -0000", 45),
        ("Fri, 01 May 2026 14:00:45 +0200", 45),
        ("Fri, 01 May 2026 11:00:00 GMT", 0),
        ("9" * 400, 3600),
        ("Fri, 01 May 2099 12:00:00 GMT", 3600),
        ("soon", None),
        ("-5", None),
        ("", None),
        (None, None),
    ],
)
def test_a_rate_limited_answer_pauses_for_what_it_asks(value, seconds):
    decision = policy().decide(HttpError(429, value), 1, 9, NOON)
    if seconds is None:
        assert decision.pause is None
        return
    assert decision.pause == timedelta(seconds=seconds)
    assert decision.delay == max(decision.pause, timedelta(seconds=1))


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("name", ["code", "status"])
def test_an_error_that_is_the_answer_itself_counts_too(status, name):
    error = OSError("an answer, as that of urllib")
    error.headers = {"Retry-After": "7"}
    setattr(error, name, status)
    assert policy().decide(error, 1, 9, NOON).pause == timedelta(seconds=7)


def test_another_status_does_not_pause():
    assert policy().decide(HttpError(500), 1, 9, NOON).pause is None
    assert policy().decide(HttpError(404), 1, 9, NOON).pause is None


@pytest.mark.parametrize("given", [3, 3.0, "3", timedelta(seconds=3)])
def test_an_error_that_pauses_may_name_the_time(given):
    error = RateLimitExceededError("slow down", retry_after=given)
    assert str(error) == "slow down"
    assert policy().decide(error, 1, 9, NOON).pause == timedelta(seconds=3)


def test_the_attribute_of_an_error_that_does_not_pause_means_nothing():
    error = ValueError("x")
    error.retry_after = 60
    decision = policy().decide(error, 1, 9, NOON)
    assert (decision.pause, decision.delay) == (None, policy().decide(KeyError(), 1, 9).delay)


def test_an_answer_that_cannot_be_read_is_judged_as_if_it_named_no_time():
    class Broken(RateLimitExceededError):
        @property
        def response(self):
            raise LookupError("closed")

    assert policy().decide(Broken(), 1, 9, NOON).pause == timedelta(seconds=30)


def test_a_permanent_error_stays_permanent_whatever_the_service_asked():
    class Final(PermanentError):
        response = Answer(429, "9")

    assert not policy().decide(Final(), 1, 9, NOON).retry
