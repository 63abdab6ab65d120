"""The Redis coordination passes the suite of every coordination."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from kjo_django.coordination.base import slot_name
from kjo_django.coordination.redis import RedisCoordination
from kjo_django.exceptions import CoordinationForgotError
from kjo_django.testing.coordination_conformance import CoordinationConformance, one


def cache_at(url: str) -> dict[str, Any]:
    """A django-redis cache whose own prefix and version must not show in our keys."""
    return {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": url,
        "KEY_PREFIX": "the-cache's-own",
        "VERSION": 7,
        "OPTIONS": {"SOCKET_CONNECT_TIMEOUT": 2, "SOCKET_TIMEOUT": 2},
    }


@pytest.mark.redis
class TestRedis(CoordinationConformance):
    options: dict[str, Any] = {"CACHE": "kjo"}

    @pytest.fixture(autouse=True)
    def _cache(self, redis_server: Any, settings: Any) -> None:
        settings.CACHES = {**settings.CACHES, "kjo": cache_at(redis_server.url)}

    def make_coordination(self) -> RedisCoordination:
        return RedisCoordination(self.options)


@pytest.mark.redis
class TestRedisWithAPrefix(TestRedis):
    """The prefix is for Redis Cluster and for several projects in one Redis."""

    options = {"CACHE": "kjo", "KEY_PREFIX": "{shop*}"}


@pytest.mark.promise("limit-without-coordination")
@pytest.mark.redis
def test_a_server_that_lost_its_data_limits_nothing(redis_server: Any) -> None:
    """The permits and slots it gave before are unknown to it: others would be too many."""
    coordination = RedisCoordination({"URL": redis_server.url})
    sign = ("WORKER:lost", "me")
    try:
        with pytest.raises(CoordinationForgotError):
            coordination.permit([one("RATE:lost")], sign)
        with pytest.raises(CoordinationForgotError):
            coordination.claim_slots([("SLOT:lost", 1)], "me", timedelta(minutes=1), sign)
        assert coordination.holders([slot_name("SLOT:lost", 1)]) == {}
        assert coordination.permit([one("RATE:lost")])[0].wait == 0
    finally:
        coordination.close()
