"""Whatever is raised while a job is run, judged or recorded counts as an attempt of it: nothing
runs for ever."""

from __future__ import annotations

import threading

import pytest
from django.db import connections

from kjo_django import registry
from kjo_django.engine import failures
from kjo_django.engine.attempt import Ending
from kjo_django.messages import serializers
from kjo_django.models import DeadLetter, Job, JobFailure
from tests.unit.deliveries import as_job, make_everything_due, states
from tests.unit.engine.bench import both, settled


def in_a_thread(function):
    """Call it as a lane would: in a thread that is not the main one."""
    raised = []

    def run():
        try:
            function()
        except BaseException as error:
            raised.append(error)
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(120)
    assert not thread.is_alive()
    if raised:
        raise AssertionError(f"It raised {raised[0]!r}") from raised[0]


def run_to_its_end(bench, rounds=12):
    """Run every attempt; what is deferred comes up again, as it does in a worker."""
    deferred = []
    for _ in range(rounds):
        make_everything_due()
        deliveries = [*deferred, *bench.poll()]
        if not deliveries:
            return
        deferred = bench.run(deliveries)
    raise AssertionError(f"still running after {rounds} rounds")


def interrupted(*arguments):
    raise KeyboardInterrupt


async def completed_coroutine():
    return None


async def interrupted_coroutine(*arguments):
    raise KeyboardInterrupt


@both
@pytest.mark.parametrize(
    ("function", "options"),
    [
        (interrupted, {}),
        (interrupted, {"atomic": False}),
        (interrupted, {"batch": 5}),
        (interrupted, {"batch": 5, "atomic": False}),
        (interrupted_coroutine, {}),
        (interrupted_coroutine, {"atomic": False}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_handler_that_raises_keyboard_interrupt_spends_its_attempts(bench, function, options):
    # Given one beside jobs of others
    as_job(lambda: None, "bench.pass", atomic=options.get("atomic", True)).enqueue()
    as_job(function, "bench.interrupted", max_attempts=2, **options).enqueue(
        **({"number": 1} if options.get("batch") else {})
    )
    as_job(lambda: None, "bench.pass", atomic=options.get("atomic", True)).enqueue()
    # When
    in_a_thread(lambda: run_to_its_end(bench))
    # Then
    assert states() == ["completed", "failed", "completed"]
    letter = DeadLetter.objects.get()
    assert (letter.reason, letter.attempts) == ("exhausted", 2)
    assert letter.error_type == "KeyboardInterrupt"
    assert settled(bench)


def test_a_keyboard_interrupt_in_the_main_thread_goes_on(bench):
    """Somebody pressed Ctrl-C while a command ran the job itself."""
    as_job(interrupted, "bench.interrupted").enqueue()
    with pytest.raises(KeyboardInterrupt):
        bench.run()


@pytest.mark.promise("stored-before-acknowledged")
@both
def test_a_run_that_was_not_judged_is_not_acknowledged(bench, monkeypatch):
    """Taken for settled, its job would stay open for ever."""
    # Given
    as_job(completed_coroutine, "bench.forgotten", atomic=False).enqueue()
    deliveries = bench.poll()
    # When
    with monkeypatch.context() as patched:
        patched.setattr(failures, "judge", lambda runtime, attempt: attempt)
        deferred = bench.run(deliveries)
    # Then
    assert deferred == deliveries
    assert states() == ["queued"]
    # And when it comes up again
    bench.run(deferred)
    assert states() == ["completed"]


class UnreadableError(OSError):
    """An error that raises when it is looked at."""

    errno = property(lambda self: 1 / 0)


@both
@pytest.mark.parametrize("options", [{}, {"atomic": False}, {"batch": 5}], ids=str)
@pytest.mark.parametrize("fault", ["a back-off that is none", "an error that raises"])
def test_a_failure_that_cannot_be_judged_is_counted(bench, transport, fault, options):
    # Given
    def fail(*arguments):
        raise UnreadableError if fault == "an error that raises" else ValueError("no")

    backoff = 3 if fault == "a back-off that is none" else None
    job = as_job(fail, "bench.fail", max_attempts=3, backoff=backoff, **options)
    job.enqueue(**({"number": 1} if options.get("batch") else {}))
    as_job(lambda: None, "bench.pass").enqueue()
    # When
    run_to_its_end(bench)
    # Then
    assert states() == ["failed", "completed"]
    assert [r for r in bench.results if r is not Ending.COMPLETED] == [
        Ending.RETRIED,
        Ending.RETRIED,
        Ending.DEAD,
    ]
    assert [failure.attempt for failure in JobFailure.objects.order_by("attempt")] == [1, 2, 3]
    assert DeadLetter.objects.get().reason == "exhausted"
    assert settled(bench)


@both
@pytest.mark.parametrize("options", [{}, {"atomic": False}], ids=str)
@pytest.mark.parametrize("failing", [True, False])
def test_an_outcome_that_can_never_be_recorded_ends_as_stalled(
    bench, monkeypatch, options, failing
):
    """Its failure cannot be, or its completion cannot be."""
    # Given
    from kjo_django.engine import recorder

    def maybe():
        if failing:
            raise ValueError("no")

    as_job(maybe, "bench.bad", max_attempts=3, **options).enqueue()
    as_job(lambda: None, "bench.pass", **options).enqueue()
    bad = str(Job.objects.get(handler="bench.bad").pk)
    monkeypatch.setattr(bench.stopping, "wait", lambda seconds: False)

    def refusing(original, results):
        def record(using, outcomes, *arguments, **named):
            for outcome in outcomes:
                if outcome.delivery.message.job_id == bad and outcome.ending in results:
                    raise TypeError("a bug of ours")
            return original(using, outcomes, *arguments, **named)

        return record

    record = failures.record_failures
    monkeypatch.setattr(failures, "record_failures", refusing(record, {Ending.RETRIED}))
    monkeypatch.setattr(recorder, "complete", refusing(recorder.complete, {Ending.COMPLETED}))
    # When
    run_to_its_end(bench)
    # Then
    assert states() == ["failed", "completed"]
    letter = DeadLetter.objects.get()
    assert (letter.reason, letter.attempts) in [("stalled", 3), ("exhausted", 3)]
    assert settled(bench)


@both
def test_hooks_that_raise_what_ends_a_process_end_nothing(bench, monkeypatch):
    # Given
    job = as_job(lambda: 1 / 0, "bench.fail", max_attempts=1)
    handler = registry.find("bench.fail")

    def leave(outcome):
        raise SystemExit(3)

    monkeypatch.setattr(handler, "observes", True)
    monkeypatch.setattr(handler, "on_failure", leave)
    monkeypatch.setattr(handler, "on_settled", leave)
    job.enqueue()
    # When
    assert bench.run() == []
    # Then
    assert bench.results == [Ending.DEAD]
    assert states() == ["failed"]
    assert settled(bench)


def leave(*arguments):
    raise SystemExit(3)


class Falsy(ValueError):
    """Is False, as an error with an empty list of faults may be."""

    def __bool__(self):
        return False


class Unanswered(ValueError):
    """Cannot be asked whether it is True."""

    __bool__ = leave


class Mute(ValueError):
    """Ends the process when it is asked for its text."""

    __str__ = leave


class Secretive(ValueError):
    """Ends the process when it is asked for anything that errors may have."""

    code = reason = details = response = retry_after = to_dict = property(leave)


HOSTILE = [Falsy, Unanswered, Mute, Secretive]


@pytest.mark.parametrize("error", HOSTILE)
@pytest.mark.parametrize("options", [{}, {"atomic": False}, {"batch": 2}], ids=str)
def test_an_error_that_is_hostile_to_whoever_looks_at_it_counts(bench, error, options):
    """The job ran for ever with no attempt counted, and the type of a false one was not kept."""

    # Given
    def work(*arguments):
        raise error("why")

    as_job(work, "bench.fail", max_attempts=2, **options).enqueue()
    # When
    in_a_thread(lambda: run_to_its_end(bench))
    # Then
    assert states() == ["failed"]
    kind = f"{error.__module__}.{error.__qualname__}"
    assert set(JobFailure.objects.values_list("attempt", "error_type")) == {(1, kind), (2, kind)}
    letter = DeadLetter.objects.get()
    assert (letter.reason, letter.error_type) == ("exhausted", kind)
    assert letter.error in ("why", "Mute")
    assert error.__name__ in letter.traceback
    assert settled(bench)


@pytest.mark.parametrize("error", [SystemExit(3), LookupError()], ids=repr)
def test_a_back_off_that_ends_the_process_costs_no_more_than_its_attempt(bench, error):
    # Given
    def backoff(attempt, raised):
        raise error

    as_job(lambda: 1 / 0, "bench.fail", max_attempts=2, backoff=backoff).enqueue()
    # When
    in_a_thread(lambda: run_to_its_end(bench))
    # Then
    assert states() == ["failed"]
    assert JobFailure.objects.count() == 2
    assert settled(bench)


@pytest.mark.parametrize("options", [{}, {"atomic": False}, {"batch": 2}], ids=str)
def test_a_coroutine_that_a_decorator_hides_is_told_and_not_taken_for_a_result(bench, options):
    """The job completed, and its function never ran."""

    # Given
    async def work(*arguments): ...

    as_job(lambda *arguments: work(), "bench.hidden", max_attempts=5, **options).enqueue()
    # When
    run_to_its_end(bench)
    # Then
    letter = DeadLetter.objects.get()
    assert "a decorator hides that its function is an `async def`" in letter.error
    assert letter.attempts == 1


# --- Serializers of somebody's own ----------------------------------------------------------------


class Text:
    """A serializer that takes nothing but text."""

    content_type = "text/plain"

    def dumps(self, value):
        return str.encode(value)

    def loads(self, data):
        return data.decode("ascii")


@pytest.fixture
def text(monkeypatch):
    monkeypatch.setattr(serializers, "_serializers", dict(serializers._serializers))
    return Text()


@pytest.mark.parametrize("options", [{}, {"atomic": False}], ids=str)
def test_a_result_goes_through_a_serializer_of_text(bench, text, options):
    as_job(lambda: "done", "bench.text", result_serializer=text, **options).enqueue()
    bench.run()
    assert states() == ["completed"]
    job = Job.objects.get()
    assert serializers.load_result(bytes(job.result)) == "done"


def test_a_result_goes_through_its_payloads_serializer_of_text(text):
    serializers.register_serializer(text)
    assert serializers.load_result(serializers.dump_result("done", text), text) == "done"


@pytest.mark.parametrize("options", [{}, {"atomic": False}, {"batch": 5}], ids=str)
def test_a_result_its_serializer_cannot_write_is_fatal_after_one_run(bench, text, options):
    # Given
    ran = []

    def number(*arguments):
        ran.append(1)
        return [5] if options.get("batch") else 5

    job = as_job(number, "bench.number", result_serializer=text, **options)
    job.enqueue(**({"number": 1} if options.get("batch") else {}))
    # When
    run_to_its_end(bench)
    # Then
    letter = DeadLetter.objects.get()
    assert (ran, letter.reason) == ([1], "fatal")
    assert letter.error.startswith("The handler's result cannot be stored: text/plain: TypeError")


@pytest.mark.parametrize("options", [{}, {"atomic": False}, {"batch": 5}], ids=str)
def test_a_payload_its_serializer_cannot_read_dies_at_once_and_says_why(bench, text, options):
    # Given
    as_job(lambda value: None, "bench.text", serializer=text, **options)
    bench.publish(b"\xff", kjo_id="foreign-1", kjo_type="bench.text", content_type="text/plain")
    # When
    bench.run()
    # Then
    letter = DeadLetter.objects.get()
    assert letter.reason == "deserialization"
    assert letter.error.startswith("Not valid text/plain: UnicodeDecodeError")
    assert letter.attempts == 1
    assert settled(bench)
