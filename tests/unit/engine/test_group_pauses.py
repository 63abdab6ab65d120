"""Errors that pause a partition: what met one keeps its place and its attempts, for a while."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import quote, unquote
from urllib.request import urlopen

import pytest
from django.utils import timezone

from kjo_django.engine.attempt import Ending
from kjo_django.exceptions import PausableError, RateLimitExceededError
from kjo_django.models import DeadLetter, Job, JobFailure, Mark
from kjo_django.runtime import get_coordination
from tests.ledger import jobs as ledger
from tests.unit.deliveries import as_job, entries, states
from tests.unit.engine.bench import GOOD, both, reconfigured, settled

KINDS = {
    "a transaction": {},
    "outside a transaction": {"atomic": False},
    "a coroutine": {"atomic": False},
    "a batch": {"batch": 5},
    "a batch outside a transaction": {"batch": 5, "atomic": False},
}


class Service:
    """A service that is away at first; handlers note in which order they reached it.

    :param error: what is raised while it is away.
    """

    def __init__(self, error: type[Exception] = RateLimitExceededError) -> None:
        self.is_away = True
        self.calls: list[int] = []
        self.reached: list[int] = []
        self._error = error

    def job(self, kind: str, **options):
        def one(number):
            self.calls.append(number)
            if self.is_away:
                raise self._error("slow down")
            self.reached.append(number)

        async def coroutine(number):
            one(number)

        def several(items):
            for item in items:
                one(item.payload["number"])

        given = KINDS[kind] | options
        function = coroutine if kind == "a coroutine" else several if "batch" in given else one
        return as_job(function, "bench.calls_service", **given)


@pytest.fixture
def bench(settings, bench):
    made = reconfigured(settings, bench, ERROR_RECOVERY_DELAYS={"rate_limit": 9})
    yield made
    made.close()


@both
@pytest.mark.parametrize("kind", KINDS)
def test_an_outage_costs_no_attempt_and_no_place(bench, transport, kind):
    # Given three jobs of a key, each of which may be tried once
    service = Service()
    for number in range(3):
        service.job(kind, max_attempts=1).using(key="k").enqueue(number=number)
    deliveries = bench.poll()
    # Lanes start one coroutine of a key at a time.
    group = deliveries[:1] if kind == "a coroutine" else deliveries
    # When what they need is away for a long time
    for _ in range(4):
        deferred = bench.run(group)
        assert set(deferred) == set(group)
    # Then the first was tried each time, nothing behind it, and nothing is spent
    assert service.calls == [0] * 4
    assert [outcome.pause_seconds for outcome in bench.pauses] == [9.0] * 4
    assert (states(), bench.outcomes) == (["queued"] * 3, [])
    assert set(Job.objects.values_list("attempts", "lease_token")) == {(0, "")}
    assert not JobFailure.objects.exists()
    assert not list(get_coordination().names("CONS:"))
    # And once it is back they run in their order
    service.is_away = False
    assert bench.run(deliveries) == []
    assert service.reached == [0, 1, 2]
    assert (states(), bench.lag()) == (["completed"] * 3, 0)
    assert not DeadLetter.objects.exists()
    assert settled(bench)


@both
@pytest.mark.parametrize("kind", KINDS)
def test_once_its_budget_is_used_up_each_pause_is_an_attempt(settings, bench, transport, kind):
    # Given a message that was paused a while ago, by a worker that is gone
    bench = reconfigured(settings, bench, PAUSE_BUDGET=timedelta(hours=2))
    service = Service()
    service.job(kind, max_attempts=2).enqueue(number=0)
    deliveries = bench.poll()
    assert bench.run(deliveries) == deliveries
    (mark,) = Mark.objects.filter(name__startswith="PAUSED:")
    Mark.objects.update(value=(timezone.now() - timedelta(hours=2)).isoformat())
    again = bench.read(deliveries[0].record)
    # When another worker meets the same
    assert bench.run([again]) == []
    bench.run_until_done()
    # Then
    assert bench.results == [Ending.RETRIED, Ending.DEAD]
    assert len(bench.pauses) == 3
    assert DeadLetter.objects.get().reason == "exhausted"
    assert mark.expires_at > timezone.now() + timedelta(days=1)


@both
def test_a_message_nobody_enqueued_here_keeps_its_place_too(bench, transport):
    # Given
    service = Service()
    service.job("a transaction")
    bench.publish(b'{"number": 7}', **GOOD | {"kjo_type": "bench.calls_service"})
    deliveries = bench.poll()
    # When
    deferred = bench.run(deliveries)
    # Then it has no row, no retry and no dead letter
    assert deferred == deliveries
    assert not Job.objects.exists()
    service.is_away = False
    assert bench.run(deferred) == []
    assert service.reached == [7]
    assert settled(bench)


def test_others_of_its_partition_wait_with_it_and_others_go_on(bench):
    service = Service()
    service.job("a transaction").enqueue_many([{"number": n} for n in range(3)])
    ledger.write.enqueue(job="behind")
    deliveries = bench.poll()
    assert bench.run(deliveries) == deliveries
    assert (service.calls, entries()) == ([0], {})


def test_an_error_of_no_class_rests_for_the_first_back_off(bench):
    service = Service(PausableError)
    service.job("a transaction").enqueue(number=0)
    bench.run()
    assert [outcome.pause_seconds for outcome in bench.pauses] == [1.0]


class _LimitedService(BaseHTTPRequestHandler):
    """Answers 429 with the Retry-After in its path, until the server says it is back."""

    def do_GET(self) -> None:
        self.send_response(200 if self.server.is_back else 429)
        if asked := self.path.removeprefix("/"):
            self.send_header("Retry-After", unquote(asked))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Write nothing."""


@pytest.fixture
def limited_service():
    server = HTTPServer(("127.0.0.1", 0), _LimitedService)
    server.is_back = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("is_date", [False, True], ids=["in seconds", "as a date"])
def test_a_rate_limited_answer_spends_no_attempt_and_pauses_as_long_as_it_asks(
    bench, limited_service, is_date
):
    # Given a job that may be tried once, and a service that asks to wait for about 77 seconds
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=77), usegmt=True)
    address = f"http://127.0.0.1:{limited_service.server_port}/{quote(later if is_date else '77')}"
    as_job(lambda: urlopen(address).close(), "bench.calls_service", max_attempts=1).enqueue()
    deliveries = bench.poll()
    # When
    assert bench.run(deliveries) == deliveries
    # Then
    (pause,) = bench.pauses
    assert 70 <= pause.pause_seconds <= 77
    assert (states(), Job.objects.get().attempts) == (["queued"], 0)
    assert not JobFailure.objects.exists()
    # And once the service is back the job completes
    limited_service.is_back = True
    assert bench.run(deliveries) == []
    assert states() == ["completed"]


def test_without_coordination_a_worker_remembers_its_own_pauses(settings, bench, coordination_away):
    # Given
    bench = reconfigured(settings, bench, PAUSE_BUDGET=timedelta(hours=2))
    service = Service()
    service.job("a transaction", max_attempts=1).enqueue(number=0)
    deliveries = bench.poll()
    coordination_away("get_marks", "set_marks")
    # When
    assert bench.run(deliveries) == deliveries
    (delivery,) = deliveries
    delivery.paused_since -= timedelta(hours=3)
    # Then
    assert bench.run(deliveries) == []
    assert bench.results == [Ending.DEAD]


def test_a_command_that_runs_a_job_itself_has_no_partition_to_rest(bench):
    """It does not wait: the attempt counts, as it did."""
    from kjo_django.engine.group import Pipeline

    service = Service()
    service.job("a transaction").enqueue(number=0)
    deliveries = bench.poll()
    pipeline = Pipeline(
        bench.leases, bench.watch, worker="command", listeners=[bench.outcomes.extend]
    )
    assert pipeline.run(deliveries) == []
    assert bench.results == [Ending.RETRIED]
