"""The Redis coordination and the Redis Streams transport pass their suites on Valkey."""

from __future__ import annotations

import pytest
import redis

from tests.conformance import test_coordination_redis as coordination
from tests.conformance import test_redis_streams as streams
from tests.services.redis import ValkeyServer

# Large: in the tiers before, Redis answers for both.
pytestmark = [pytest.mark.redis, pytest.mark.large]


@pytest.fixture
def redis_server(valkey_server: ValkeyServer) -> ValkeyServer:
    """Valkey, where the suites ask for Redis."""
    return valkey_server


def test_the_server_is_valkey(redis_server: ValkeyServer) -> None:
    with redis.Redis.from_url(redis_server.url) as client:
        assert client.info("server")["server_name"] == "valkey"


class TestValkey(coordination.TestRedis):
    pass


class TestStreamsOfValkey(streams.TestRedisStreams):
    pass
