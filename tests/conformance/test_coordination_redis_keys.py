"""What another Redis client sees of the Redis coordination, and what a lost Redis does."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import redis
from django.core.exceptions import ImproperlyConfigured

from kjo_django.coordination.redis import RedisCoordination
from kjo_django.exceptions import CoordinationError
from kjo_django.testing.conformance import eventually
from tests.conformance.test_coordination_redis import cache_at
from tests.services import RedisServer
from tests.services.fixtures import require
from tests.waiting import PATIENCE

pytestmark = pytest.mark.redis


@pytest.fixture
def raw(redis_server: Any, settings: Any) -> Iterator[redis.Redis]:
    settings.CACHES = {**settings.CACHES, "kjo": cache_at(redis_server.url)}
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushdb()
        yield client


@pytest.fixture
def coordination(raw: redis.Redis) -> RedisCoordination:
    return RedisCoordination({"CACHE": "kjo"})


def test_kjo_60_the_key_of_a_lease_is_exactly_its_name(
    coordination: RedisCoordination, raw: redis.Redis
) -> None:
    """CONS:PREFIX:id = token, for PROCESSING_TTL; neither prefix nor version of the cache."""
    coordination.claim(["CONS:EMAIL:7"], "the-token", timedelta(seconds=300))

    assert sorted(raw.keys()) == [b"CONS:EMAIL:7", b"DELIVERIES:CONS:EMAIL:7"]
    assert raw.get("CONS:EMAIL:7") == b"the-token"
    assert 295_000 < raw.pttl("CONS:EMAIL:7") <= 300_000
    assert raw.get("DELIVERIES:CONS:EMAIL:7") == b"1"
    assert 86_000 < raw.ttl("DELIVERIES:CONS:EMAIL:7") <= 86_400
    coordination.release(["CONS:EMAIL:7"], "the-token", count_delivery=True)
    assert raw.keys() == [b"DELIVERIES:CONS:EMAIL:7"]
    coordination.claim(["CONS:EMAIL:7"], "the-token", timedelta(seconds=300))
    coordination.release(["CONS:EMAIL:7"], "the-token")
    assert raw.keys() == []


def test_kjo_28_the_key_of_a_sent_mark_is_exactly_its_name(
    coordination: RedisCoordination, raw: redis.Redis
) -> None:
    """PREFIX_SENT:id = hash, for SENT_TTL."""
    coordination.set_marks({"PREFIX_SENT:7": "0a1b"}, timedelta(seconds=20))

    assert raw.keys() == [b"PREFIX_SENT:7"]
    assert raw.get("PREFIX_SENT:7") == b"0a1b"
    assert 19_000 < raw.pttl("PREFIX_SENT:7") <= 20_000


def test_kjo_62_a_key_set_by_another_client_is_respected(
    coordination: RedisCoordination, raw: redis.Redis
) -> None:
    raw.set("CONS:EMAIL:7", "1", ex=60)
    (claim,) = coordination.claim(["CONS:EMAIL:7"], "me", timedelta(seconds=300))
    assert not claim.acquired
    coordination.release(["CONS:EMAIL:7"], "me")
    assert raw.get("CONS:EMAIL:7") == b"1"


def test_kjo_f8_never_keys_and_one_round_trip_each(
    coordination: RedisCoordination, raw: redis.Redis
) -> None:
    names = [f"CONS:EMAIL:{number}" for number in range(50)]
    coordination.claim(names, "me", timedelta(seconds=60))  # the script is known now
    coordination.renew(names, "me", timedelta(seconds=60))
    coordination.release(names, "me")
    raw.config_resetstat()
    coordination.claim(names, "me", timedelta(seconds=60))
    coordination.renew(names, "me", timedelta(seconds=60))
    assert len(list(coordination.names("CONS:EMAIL:"))) == 50
    coordination.release(names, "me")
    coordination.set_marks({f"PREFIX_SENT:{name}": "x" for name in names}, timedelta(seconds=60))
    coordination.get_marks([f"PREFIX_SENT:{name}" for name in names])

    calls = {name: stats["calls"] for name, stats in raw.info("commandstats").items()}
    assert "cmdstat_keys" not in calls
    assert calls["cmdstat_scan"] >= 1
    assert calls["cmdstat_evalsha"] == 3
    assert calls["cmdstat_mget"] == 1


def test_a_server_that_forgot_the_scripts_gets_them_again(
    coordination: RedisCoordination, raw: redis.Redis
) -> None:
    coordination.claim(["CONS:EMAIL:7"], "me", timedelta(seconds=60))
    raw.script_flush()
    assert coordination.renew(["CONS:EMAIL:7"], "me", timedelta(seconds=60)) == [True]


def test_the_wrong_cache_is_a_mistake_in_the_settings(raw: redis.Redis, settings: Any) -> None:
    settings.CACHES = {
        **settings.CACHES,
        "memory": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"},
    }
    for alias in ("memory", "missing"):
        with pytest.raises(ImproperlyConfigured, match=rf"'CACHE'\] is '{alias}'"):
            RedisCoordination({"CACHE": alias})


class TestRestarts:
    """A server of its own, to be stopped under its clients."""

    @pytest.fixture
    def server(self, settings: Any) -> Iterator[RedisServer]:
        require(redis=True)
        with RedisServer() as server:
            settings.CACHES = {**settings.CACHES, "kjo_restarting": cache_at(server.url)}
            yield server

    def test_a_lost_redis_is_a_coordination_error_that_names_the_setting(
        self, server: RedisServer
    ) -> None:
        coordination = RedisCoordination({"CACHE": "kjo_restarting"})
        coordination.claim(["n"], "me", timedelta(minutes=1))
        server.stop()
        for call in (
            lambda: coordination.claim(["n"], "me", timedelta(minutes=1)),
            lambda: coordination.renew(["n"], "me", timedelta(minutes=1)),
            lambda: coordination.release(["n"], "me"),
            lambda: coordination.holders(["n"]),
            lambda: list(coordination.names("n")),
            lambda: coordination.set_marks({"n": "x"}, timedelta(minutes=1)),
            lambda: coordination.get_marks(["n"]),
            lambda: coordination.notify("n"),
            lambda: coordination.listen(["n"]),
            lambda: coordination.probe(5),
        ):
            with pytest.raises(CoordinationError, match=r"CACHES\['kjo_restarting'\]"):
                call()
        server.start()
        # The new server knows neither the lease nor the scripts (KJO-F20: the row decides).
        (claim,) = coordination.claim(["n"], "you", timedelta(minutes=1))
        assert claim.acquired

    def test_a_listener_hears_again_after_a_restart(self, server: RedisServer) -> None:
        coordination = RedisCoordination({"CACHE": "kjo_restarting"})
        listener = coordination.listen(["c"])
        coordination.notify("c")
        assert listener.wait(PATIENCE) == {"c"}
        server.stop()
        assert listener.wait(0.5) == set()
        server.start()
        assert listener.wait(PATIENCE) == {"c"}, "nobody knows what was missed"
        coordination.notify("c")
        assert eventually(lambda: listener.wait(1)) == {"c"}
        assert listener.wait(0.2) == set()
        listener.close()

    def test_an_idle_listener_sleeps(self, server: RedisServer, monkeypatch: Any) -> None:
        """Looking ten times a second was a tenth of what an idle worker used."""
        coordination = RedisCoordination({"CACHE": "kjo_restarting"})
        listener = coordination.listen(["c"])
        looks: list[float] = []
        can_read = redis.Connection.can_read

        def look(connection: redis.Connection, timeout: float = 0) -> bool:
            looks.append(timeout)
            return can_read(connection, timeout)

        monkeypatch.setattr(redis.Connection, "can_read", look)
        assert listener.wait(1.0) == set()
        assert looks == [0, 0], "one before it sleeps, one after"
        listener.close()
