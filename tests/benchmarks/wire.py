"""What a process asks of PostgreSQL, read on its way there: each statement, whoever composed it."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

CHUNK = 1 << 16
STARTUP = 196608
"""The protocol's version, by which the one message is known that is followed by typed ones."""
BOUNDS = re.compile(
    r"\s*(BEGIN|START|COMMIT|ROLLBACK|SAVEPOINT|RELEASE|SET|SELECT set_config)\b", re.IGNORECASE
)
ONE = re.compile(r"""(?:[^;'"]|'[^']*'|"[^"]*")+""")
"""A statement of a text that has several; a quote within a literal is two."""


@dataclass
class Asked:
    """The statements of some connections."""

    statements: list[tuple[float, str]] = field(default_factory=list)
    """When each was sent (monotonic clock), and its text."""
    round_trips: int = 0
    """How often a connection waits for all that it has asked."""

    def counts(self) -> tuple[int, int, int]:
        """Return the statements that do something, those that bound a transaction or set how it
        runs, and the round trips."""
        bounds = sum(1 for _, text in self.statements if BOUNDS.match(text))
        return len(self.statements) - bounds, bounds, self.round_trips


class Reader:
    """Reads what one connection sends, in pieces as they come."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._left = b""
        self._has_begun = False
        self._prepared: dict[bytes, str] = {}
        self._bound: dict[bytes, str] = {}

    def read(self, data: bytes) -> None:
        """Take the next piece."""
        self._left += data
        while message := self._next():
            kind, body = message
            if kind == b"Q":
                for one in ONE.findall(_text(body.rstrip(b"\0"))):
                    if one.strip():
                        self._note(one.strip())
                self._asked.round_trips += 1
            elif kind == b"P":
                name, text = body.split(b"\0")[:2]
                self._prepared[name] = _text(text)
            elif kind == b"B":
                portal, name = body.split(b"\0")[:2]
                self._bound[portal] = self._prepared.get(name, "")
            elif kind == b"E":
                self._note(self._bound.get(body.split(b"\0")[0], ""))
            elif kind == b"S":
                self._asked.round_trips += 1

    def _note(self, text: str) -> None:
        self._asked.statements.append((time.monotonic(), text))

    def _next(self) -> tuple[bytes, bytes] | None:
        """Return the kind and the body of a message that is there as a whole."""
        start = 1 if self._has_begun else 0  # what comes first has no kind
        if len(self._left) < start + 4:
            return None
        end = start + int.from_bytes(self._left[start : start + 4], "big")
        if len(self._left) < end:
            return None
        message, self._left = self._left[:end], self._left[end:]
        kind, body = message[:start], message[start + 4 :]
        if not self._has_begun:
            self._has_begun = int.from_bytes(body[:4], "big") == STARTUP
        return kind, body


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


@contextmanager
def listening(host: str, port: int) -> Iterator[tuple[int, Asked]]:
    """Yield the port of a proxy to a server, and what is asked through it."""
    asked = Asked()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="counting-proxy", daemon=True)
    thread.start()
    proxy = _Proxy(host, port, asked)
    try:
        yield asyncio.run_coroutine_threadsafe(proxy.start(), loop).result(), asked
    finally:
        asyncio.run_coroutine_threadsafe(proxy.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class _Proxy:
    def __init__(self, host: str, port: int, asked: Asked) -> None:
        self._address = host, port
        self._asked = asked
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        there, back = await asyncio.open_connection(*self._address)
        ways = _pass_on(reader, back, Reader(self._asked)), _pass_on(there, writer, None)
        with suppress(asyncio.CancelledError):  # who stops the proxy waits for it
            await asyncio.gather(*ways)


async def _pass_on(
    source: asyncio.StreamReader, target: asyncio.StreamWriter, reader: Reader | None
) -> None:
    try:
        with suppress(ConnectionError):
            while data := await source.read(CHUNK):
                if reader is not None:
                    reader.read(data)
                target.write(data)
                await target.drain()
    finally:
        target.close()
