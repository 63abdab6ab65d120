"""Listening to a Redis that falls silent: its machine died, or a firewall forgot the connection."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from inspect import signature

import pytest

pytest.importorskip("redis")

from redis import Redis

from kjo_django.coordination import redis as listening
from kjo_django.coordination.redis import RedisListener
from tests.waiting import PATIENCE

pytestmark = pytest.mark.medium  # threads and waits of a worker, in real time


class Server:
    """As much of a Redis as a listener meets. ``is_silent`` takes what comes and says nothing."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.asked: list[str] = []
        self.connections = 0
        self.is_silent = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.connections += 1
            self.is_silent = False  # another machine has taken its place
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        stream = connection.makefile("rb")
        while line := stream.readline():
            words = []
            for _ in range(int(line[1:])):
                length = int(stream.readline()[1:])
                words.append(stream.read(length + 2)[:-2].decode())
            self.asked.append(words[0].upper())
            if not self.is_silent:
                connection.sendall(self._answer(words))

    def _answer(self, words: list[str]) -> bytes:
        match words[0].upper():
            case "SUBSCRIBE":
                name = words[1].encode()
                return b"*3\r\n$9\r\nsubscribe\r\n$%d\r\n%s\r\n:1\r\n" % (len(name), name)
            case "PING":
                return b"*2\r\n$4\r\npong\r\n$0\r\n\r\n"
        return b"+OK\r\n"

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.close()


@pytest.fixture
def listener(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisListener]:
    monkeypatch.setattr(listening, "_ASK_AFTER", 0.1)
    monkeypatch.setattr(listening, "_ANSWERS_WITHIN", 0.5)
    monkeypatch.setattr(RedisListener, "longest_sleep", 0.05)
    # What the server above speaks; before redis 5 there was nothing else, and no such argument.
    spoken = {"protocol": 2} if "protocol" in signature(Redis.__init__).parameters else {}
    client = Redis(port=server.port, socket_timeout=2, **spoken)
    found = RedisListener("Redis", lambda: client, {"a": "a"})
    yield found
    found.close()


def test_a_server_that_falls_silent_is_left_for_one_that_answers(server, listener, caplog):
    """Promise 3: or nobody would ever wake this worker again, though Redis is long back."""
    # Given
    server.is_silent = True
    # When, Then
    assert listener.wait(PATIENCE) == {"a"}, "nobody knows what was missed"
    assert server.connections == 2
    assert "Lost the listening connection" in caplog.text


def test_a_server_that_has_nothing_to_say_is_asked_and_kept(server, listener):
    assert listener.wait(1.5) == set()
    assert server.asked.count("PING") > 2
    assert server.connections == 1
