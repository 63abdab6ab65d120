"""The Redis Streams transport passes the suite of every transport, on a real Redis."""

from __future__ import annotations

import uuid
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.test import override_settings

from kjo_django.testing.conformance import TransportConformance, eventually
from kjo_django.transports.base import OutgoingRecord, TopicPartition
from kjo_django.transports.redis_streams import transport as redis_transport

pytestmark = pytest.mark.redis


class TestRedisStreams(TransportConformance):
    lease = timedelta(seconds=1)
    rebalances = False

    @pytest.fixture(autouse=True)
    def cache(self, redis_server: Any) -> Any:
        cache = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": redis_server.url}
        self.prefix = f"{uuid.uuid4().hex[:8]}:"
        self.client = redis.Redis.from_url(redis_server.url)
        with override_settings(CACHES={"default": cache}):
            yield

    def make_transport(self) -> Any:
        from kjo_django.transports.redis_streams import RedisStreamsTransport

        return RedisStreamsTransport("test", {"KEY_PREFIX": self.prefix})

    @pytest.mark.parametrize("also_asks_for_none", [False, True])
    def test_room_for_less_than_a_record_of_each_topic_starves_none(
        self, also_asks_for_none: bool
    ) -> None:
        """A worker with its hands full asks for one record at a time, and for none between."""
        transport = self.make_transport()
        topics = ["a", "b", "c", "d"]
        transport.publish([OutgoingRecord(topic, b"") for topic in topics for _ in range(9)])
        with closing(transport.subscribe(topics, "g")) as subscription:
            taken: list[str] = []

            def read() -> bool:
                if also_asks_for_none:
                    assert subscription.poll(0, 0.0) == []
                taken.extend(record.topic for record in subscription.poll(1, 0.05))
                return len(taken) >= 9

            eventually(read, 10, "nine records")
            assert set(taken[:9]) == set(topics)

    def test_a_backlog_redis_lost_count_of_is_counted_page_by_page(self, monkeypatch: Any) -> None:
        """An entry was deleted by hand; millions of others must not all be read into memory."""
        # Given
        transport = self.make_transport()
        with closing(transport.subscribe(["t"], "g")) as subscription:
            subscription.poll(0, 0.05)
            transport.publish([OutgoingRecord("t", b"%d" % n) for n in range(25)])
            stream = transport.stream("t")
            self.client.xdel(stream, self.client.xrange(stream)[3][0])
            assert self.client.xinfo_groups(stream)[0]["lag"] is None
        monkeypatch.setattr(redis_transport, "PAGE", 5)
        # When, then
        assert transport.lag(["t"], "g") == {TopicPartition("t", 0): 24}
        # And when there are more than are worth counting
        monkeypatch.setattr(redis_transport, "MOST_COUNTED", 15)
        assert transport.lag(["t"], "g") == {TopicPartition("t", 0): 15}

    def test_what_a_crash_left_is_found_behind_what_others_are_busy_with(self) -> None:
        """Redis looks at ten entries for each that is asked for."""
        # Given a consumer busy with more, and one that died after it
        transport = self.make_transport()
        with closing(transport.subscribe(["t"], "g", lease=self.lease)) as busy:
            busy.poll(0, 0.05)
            transport.publish([OutgoingRecord("t", b"long") for _ in range(25)])
            assert len(busy.poll(25, 5)) == 25
            dead = transport.subscribe(["t"], "g", lease=self.lease)
            transport.publish([OutgoingRecord("t", b"left")])
            assert len(dead.poll(1, 5)) == 1
            # When another has room for one
            with closing(transport.subscribe(["t"], "g", lease=self.lease)) as other:
                found: list[bytes | None] = []

                def look() -> list[bytes | None]:
                    assert busy.poll(0, 0.05) == []
                    found.extend(record.value for record in other.poll(1, 0.05))
                    return found

                # Then
                eventually(look, 15, "the record of the dead")
                assert found == [b"left"]

    def test_what_it_claimed_of_one_stream_is_not_lost_with_the_claim_of_the_next(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The connection breaks in between."""
        # Given what a consumer that died was handed
        transport = self.make_transport()
        transport.publish([OutgoingRecord(topic, topic.encode()) for topic in "ab"])
        dead = transport.subscribe(["a", "b"], "g", lease=self.lease)
        left: list[Any] = []
        eventually(lambda: left.extend(dead.poll(2, 0.1)) or len(left) == 2, 10, "both records")
        claim, claimed, breaks = redis.Redis.xautoclaim, [], iter([True])

        def break_after_a_record(self: Any, *arguments: Any, **options: Any) -> Any:
            if claimed and next(breaks, False):
                raise redis.ConnectionError("gone")
            reply = claim(self, *arguments, **options)
            claimed.extend(reply[1])
            return reply

        monkeypatch.setattr(redis.Redis, "xautoclaim", break_after_a_record)
        # When another claims it
        found: set[Any] = set()
        with closing(transport.subscribe(["a", "b"], "g", lease=self.lease)) as other:

            def look() -> bool:
                found.update(record.value for record in other.poll(2, 0.05))
                return len(found) == 2

            # Then
            eventually(look, 15, "both records")

    @pytest.mark.parametrize(
        ("id", "headers"),
        [
            ("18446744073709551614-1", b"{}"),
            ("99999999999999-0", b"{}"),
            ("*", b"[" * 100_000),
            ("*", b'{"a": {"b": 1}}'),
            ("*", b"\xff"),
        ],
    )
    def test_an_entry_made_by_whomever_holds_nothing_up(self, id: str, headers: bytes) -> None:
        # Given
        transport = self.make_transport()
        with closing(transport.subscribe(["t"], "g")) as subscription:
            subscription.poll(0, 0.05)
            stream = f"{self.prefix}t"
            self.client.xadd(stream, {"kjo:h": headers, "kjo:v": b"theirs"}, id=id)
            # When
            (record,) = subscription.poll(10, 5)
            # Then it has a place and a moment a row can hold, or none
            assert record.value == b"theirs"
            assert 0 <= record.offset < 2**63
            assert record.headers == {}
            assert record.timestamp is None or record.timestamp.utcoffset() is not None
            subscription.acknowledge([record])
            subscription.flush()
            assert sum(transport.lag(["t"], "g").values()) == 0
