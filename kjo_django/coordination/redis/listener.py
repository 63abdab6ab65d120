"""Wake-up calls through PUBLISH and SUBSCRIBE of Redis or Valkey."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from redis.exceptions import RedisError

from kjo_django.coordination.reconnecting import ReconnectingListener

_PATIENCE = 5.0
"""Seconds for the server to confirm a subscription."""
_ASK_AFTER = 30.0
"""Seconds of silence until the server is asked whether it is there: a connection cut without a word
(a machine that died, a firewall that forgot it) looks silent for ever."""
_ANSWERS_WITHIN = 10.0


class RedisListener(ReconnectingListener[Any]):
    """Subscribes on a connection it takes from the pool.

    :param client: gives a client; asked again after an outage.
    :param channels: the names to listen for, by the channel of the server.
    """

    outages = (RedisError, OSError, ValueError)
    longest_sleep = _ANSWERS_WITHIN

    def __init__(self, server: str, client: Callable[[], Any], channels: Mapping[str, str]) -> None:
        self._client = client
        self._names = dict(channels)
        self._ask_at = self._answer_by = 0.0
        super().__init__(server, channels.values())

    def _connect(self) -> Any:
        pubsub = self._client().pubsub(ignore_subscribe_messages=True)
        try:
            pubsub.subscribe(*self._names)
            # The server's answer: from now on nothing is missed.
            deadline = time.monotonic() + _PATIENCE
            for _ in self._names:
                pubsub.get_message(timeout=max(0.0, deadline - time.monotonic()))
        except BaseException:
            self._disconnect(pubsub)
            raise
        self._is_heard()
        return pubsub

    def _is_heard(self) -> None:
        """Note that the server is there."""
        self._ask_at = time.monotonic() + _ASK_AFTER
        self._answer_by = 0.0

    def _descriptor(self, connection: Any) -> int:
        # The client has no public name for its socket, and no wait that can be ended.
        socket = connection.connection._sock
        if socket is None:
            raise OSError("the connection is closed")
        return int(socket.fileno())

    def _heard(self, connection: Any) -> set[str]:
        called: set[str] = set()
        connection.check_health()
        while connection.connection.can_read(timeout=0):
            self._is_heard()
            message = connection.get_message(timeout=0)
            if message is not None and message["channel"] is not None:
                called.add(self._names.get(text_of(message["channel"]), ""))
        called.discard("")
        self._ask(connection)
        return called

    def _ask(self, connection: Any) -> None:
        """Ask a server that has long been silent for a sign of life; its answer has no channel."""
        now = time.monotonic()
        if self._answer_by:
            if now >= self._answer_by:
                raise OSError("the server does not answer")
        elif now >= self._ask_at:
            connection.ping()
            self._answer_by = now + _ANSWERS_WITHIN

    def _disconnect(self, connection: Any) -> None:
        try:
            connection.close()
        except (RedisError, OSError):
            pass  # it is gone either way


def text_of(value: bytes | str) -> str:
    """Return a name as the server sent it; what is not UTF-8 is none of ours."""
    return value if isinstance(value, str) else value.decode("utf-8", "replace")
