"""The Redis Streams transport passes the suite of every transport, on a real Redis."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.test import override_settings

from kjo_django.testing.conformance import TransportConformance

pytestmark = pytest.mark.redis


class TestRedisStreams(TransportConformance):
    lease = timedelta(seconds=1)
    rebalances = False

    @pytest.fixture(autouse=True)
    def cache(self, redis_server: Any) -> Any:
        cache = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": redis_server.url}
        self.prefix = f"{uuid.uuid4().hex[:8]}:"
        with override_settings(CACHES={"default": cache}):
            yield

    def make_transport(self) -> Any:
        from kjo_django.transports.redis_streams import RedisStreamsTransport

        return RedisStreamsTransport("test", {"KEY_PREFIX": self.prefix})
