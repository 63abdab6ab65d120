"""Redis Streams with real workers: RST-F1, F2, F9, F10, X-8 and issue 4's item 5."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis

from kjo_django.conf import get_settings
from kjo_django.runtime import get_transport
from kjo_django.transports.base import OutgoingRecord
from kjo_django.transports.redis_streams.transport import trim
from tests.acceptance.engine import Engine, Servers
from tests.acceptance.test_shutdown import let_go
from tests.ledger import jobs

pytestmark = [pytest.mark.redis, pytest.mark.postgres, pytest.mark.timeout(180)]


class StreamEngine(Engine):
    """Redis Streams, Redis coordination and PostgreSQL."""

    def _kjo(self) -> dict[str, Any]:
        backend = "kjo_django.transports.redis_streams.RedisStreamsTransport"
        return {**super()._kjo(), "TRANSPORTS": {"default": {"BACKEND": backend}}}

    def lag(self) -> int:
        queue = get_settings().queue("ledger")
        return sum(get_transport().lag([queue.topic], queue.consumer_group).values())

    @property
    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.servers.redis)


@pytest.fixture
def streams(redis_server: Any, database_url: str, tmp_path: Path) -> Iterator[StreamEngine]:
    with StreamEngine(Servers(database_url, redis=redis_server.url), tmp_path) as engine:
        yield engine


@pytest.mark.promise("lease-expires")
@pytest.mark.medium
def test_a_worker_killed_with_ten_jobs_in_flight_leaves_them_to_others_RST_F1(
    streams: StreamEngine, tmp_path: Path
) -> None:
    """RST-34: ten in flight are not lost with a crash."""
    # Given a worker in the middle of ten jobs
    names, path = [f"job-{number}" for number in range(10)], tmp_path / "job"
    jobs.wait_for.enqueue_many({"job": name, "path": str(path)} for name in names)
    first = streams.worker("--concurrency", "10")
    streams.wait_until(lambda: streams.has_in_flight(first.pid, 10), "The ten never began")
    # When it is killed, and another comes
    first.kill()
    let_go(path)
    second = streams.ready_worker("--concurrency", "10")
    # Then all ten complete there without help
    streams.settle()
    streams.assert_each_ran_once(names)
    assert second.stop() == 0, second.log_tail()


def test_a_backlog_of_5000_drains_fully_RST_F2_RST_F9(streams: StreamEngine) -> None:
    # Given more than any length a stream is usually trimmed to, sent before any consumer came
    names = [f"job-{number}" for number in range(5000)]
    jobs.write.enqueue_many({"job": name} for name in names)
    relay = streams.relay()
    streams.wait_until(
        lambda: streams.client.xlen(streams.topic) >= 5000, "The relay did not send them"
    )
    assert relay.stop() == 0, relay.log_tail()
    # When
    streams.drain("--concurrency", "2")
    # Then
    streams.assert_each_ran_once(names)
    assert streams.lag() == 0


@pytest.mark.promise("row-decides")
@pytest.mark.medium
def test_a_worker_survives_a_flushed_redis_RST_F10(streams: StreamEngine) -> None:
    # Given a worker whose groups, leases and messages are all gone at once
    worker = streams.ready_worker()
    jobs.write.enqueue(job="before")
    streams.settle()
    streams.client.flushall()
    # When jobs are enqueued
    names = [f"after-{number}" for number in range(20)]
    jobs.write.enqueue_many({"job": name} for name in names)
    # Then the same worker makes its group again and runs them
    streams.settle()
    streams.assert_each_ran_once(["before", *names])
    assert worker.is_running
    assert worker.stop() == 0, worker.log_tail()


@pytest.mark.medium
def test_trimming_spares_what_any_group_still_needs_RST_F2(streams: StreamEngine) -> None:
    # Given a stream two groups read: one has acknowledged everything, one holds the fourth entry
    transport, client = get_transport(), streams.client
    stream = f"trim-{uuid.uuid4().hex[:8]}"
    fast = transport.subscribe([stream], "fast")
    slow = transport.subscribe([stream], "slow")
    fast.poll(0, 0)
    slow.poll(0, 0)
    transport.publish([OutgoingRecord(stream, str(n).encode()) for n in range(10)])
    fast.acknowledge(fast.poll(10, 5))
    fast.flush()
    held = slow.poll(5, 5)
    slow.acknowledge(held[:3])
    slow.flush()
    # When it is trimmed as if nothing had to be kept for its age
    trim(client, stream, timedelta(microseconds=-(10**9)))
    # Then the entry in flight and those not delivered are there; nothing is lost by approximation
    left = [fields[b"kjo:v"] for _, fields in client.xrange(stream)]
    assert left[-7:] == [str(n).encode() for n in range(3, 10)]
    fast.close()
    slow.close()


@pytest.mark.medium
def test_an_entry_another_system_wrote_is_read_as_its_fields_RST_21(streams: StreamEngine) -> None:
    # Given
    transport = get_transport()
    stream = f"foreign-{uuid.uuid4().hex[:8]}"
    streams.client.xadd(stream, {"resumeId": "7", "retryCount": "0"})
    # When
    subscription = transport.subscribe([stream], "group")
    (record,) = subscription.poll(10, 5)
    # Then
    assert record.value == b'{"resumeId": "7", "retryCount": "0"}'
    assert record.headers == {}
    subscription.close()


@pytest.mark.promise("debounced-payload")
@pytest.mark.medium
def test_a_replaced_payload_never_runs_and_a_debounced_one_runs_last(streams: StreamEngine) -> None:
    # Given a job whose message is in the stream, and one whose message is not
    streams.create_topics()
    replacing = jobs.write.using(unique_for=timedelta(hours=1), on_conflict="replace", unique_by=())
    replacing.enqueue(job="first")
    relay = streams.relay("--once")
    assert relay.wait() == 0, relay.log_tail()
    debounced = jobs.write_keyed.using(debounce=timedelta(seconds=1), unique_by=())
    debounced.enqueue(job="early", key="k")
    # When both are given another payload
    assert replacing.enqueue(job="second").answer == "replaced"
    assert debounced.enqueue(job="last", key="k").answer == "replaced"
    # Then
    streams.ready_worker()
    streams.settle()
    streams.assert_each_ran_once(["second", "last"])
