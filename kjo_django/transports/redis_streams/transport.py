"""Redis or Valkey streams as a transport, on the raw connection of a django-redis cache.

A topic is a stream, a consumer group is the stream's own. Entries are shared out one by one, so
there is no order of a key *between* consumers (``capabilities.ordering`` is False); within one
worker the lanes keep it. What a crashed consumer held is claimed by others once it has been silent
for the lease. An entry is removed only when it is older than ``RETENTION`` *and* every group has
acknowledged it: undelivered work is never trimmed, whatever the length of the stream.

``OPTIONS``:

``CACHE``
    Alias in ``CACHES``, default "default".
``KEY_PREFIX``
    Put before every topic to make the stream's key, default "".
``RETENTION``
    How long acknowledged entries stay readable for another group (timedelta or seconds), default
    one day. They take memory.

The form of an entry, also of one that another program wrote, is in ``subscription``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from django.core.cache import InvalidCacheBackendError
from django.core.exceptions import ImproperlyConfigured
from django_redis import get_redis_connection
from redis.exceptions import RedisError, ResponseError

from kjo_django.exceptions import PublishError
from kjo_django.transports.base import (
    AssignedCallback,
    Capabilities,
    OutgoingRecord,
    Published,
    RevokedCallback,
    TopicPartition,
    Transport,
)
from kjo_django.transports.redis_streams.subscription import (
    RedisStreamsSubscription,
    fields_of,
    lag_of,
    offset_of,
)
from kjo_django.values import duration

PIPELINE = 500
"""Entries sent in one round trip."""


class RedisStreamsTransport(Transport):
    """See the module."""

    capabilities = Capabilities(ordering=False, delay=False, transactional=False, replay=True)
    known_options = frozenset({"CACHE", "KEY_PREFIX", "RETENTION"})

    def __init__(self, alias: str, options: Mapping[str, Any]) -> None:
        super().__init__(alias, options)
        self._cache = str(self.options.get("CACHE", "default"))
        self._prefix = str(self.options.get("KEY_PREFIX", ""))
        try:
            self._retention = duration(self.options.get("RETENTION", timedelta(days=1)))
        except ValueError as error:
            raise ImproperlyConfigured(f"{self._where('RETENTION')} must be {error}.") from None
        self.client()  # connects to nothing, and refuses a cache that is none of django-redis

    def _where(self, option: str) -> str:
        return f"KJO['TRANSPORTS'][{self.alias!r}]['OPTIONS'][{option!r}]"

    def client(self) -> Any:
        """Return the raw client; its pool is made anew after a fork."""
        try:
            return get_redis_connection(self._cache, write=True)
        except (InvalidCacheBackendError, NotImplementedError) as error:
            raise ImproperlyConfigured(
                f"{self._where('CACHE')} names {self._cache!r}, which is not a cache of "
                f"django-redis: {error}"
            ) from error
        except ValueError:
            # Without the error's text, which may hold part of a password with a / or ?.
            raise ImproperlyConfigured(
                f"The LOCATION of CACHES[{self._cache!r}] is not a redis:// or rediss:// URL. A "
                "password's special characters are %2F (/), %3F (?), %23 (#) and %40 (@)."
            ) from None

    def stream(self, topic: str) -> str:
        """Return the key of a topic's stream."""
        return f"{self._prefix}{topic}"

    # --- Publishing -------------------------------------------------------------------------------

    def publish(self, records: Sequence[OutgoingRecord]) -> list[Published]:
        """XADD every record, ``PIPELINE`` at a time; each answer is its own."""
        answers: list[Published] = []
        for start in range(0, len(records), PIPELINE):
            answers += self._add(records[start : start + PIPELINE])
        return answers

    def _add(self, records: Sequence[OutgoingRecord]) -> list[Published]:
        pipeline = self.client().pipeline(transaction=False)
        for record in records:
            pipeline.xadd(self.stream(record.topic), fields_of(record))
        try:
            replies = pipeline.execute(raise_on_error=False)
        except RedisError as error:
            # Some may be stored: they are published again, and consumers skip the duplicates.
            return [Published(error=f"Redis did not answer: {error}") for _ in records]
        return [
            Published(error=str(reply))
            if isinstance(reply, Exception)
            else Published(partition=0, offset=offset_of(reply))
            for reply in replies
        ]

    # --- Subscribing ------------------------------------------------------------------------------

    def subscribe(
        self,
        topics: Sequence[str],
        group: str,
        *,
        lease: timedelta = timedelta(seconds=30),
        on_revoked: RevokedCallback | None = None,
        on_assigned: AssignedCallback | None = None,
    ) -> RedisStreamsSubscription:
        """Open a view of the streams; each is one partition, shared entry by entry."""
        return RedisStreamsSubscription(
            self.client,
            {topic: self.stream(topic) for topic in topics},
            group,
            lease=lease,
            retention=self._retention,
            on_revoked=on_revoked,
            on_assigned=on_assigned,
        )

    def close(self) -> None:
        """Nothing is held open: the pool is django-redis' own."""

    def lag(self, topics: Sequence[str], group: str) -> dict[TopicPartition, int]:
        """Count what the group has not acknowledged: waiting and in flight."""
        with self._asking() as client:
            return {
                TopicPartition(topic, 0): lag_of(client, self.stream(topic), group)
                for topic in topics
            }

    def probe(self, timeout: float) -> str:
        """Return the version of what answered. The timeout is that of the cache's connections."""
        with self._asking() as client:
            info = client.info("server")
        version = info.get("valkey_version") or info.get("redis_version", "?")
        return f"Redis {version} by the cache {self._cache!r}"

    @contextmanager
    def _asking(self) -> Iterator[Any]:
        try:
            yield self.client()
        except ResponseError as error:
            raise PublishError(f"Redis refused: {error}") from error
        except RedisError as error:
            raise PublishError(
                f"Redis cannot be reached by the cache {self._cache!r}: {error}"
            ) from error
