"""A proxy on loopback that makes a server farther away: what passes it takes so much longer."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

CHUNK = 1 << 16


@contextmanager
def farther(host: str, port: int, seconds: float) -> Iterator[int]:
    """Yield the port of a proxy to a server, which is so many seconds away in each direction."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="delaying-proxy", daemon=True)
    thread.start()
    proxy = _Proxy(host, port, seconds)
    try:
        yield asyncio.run_coroutine_threadsafe(proxy.start(), loop).result()
    finally:
        asyncio.run_coroutine_threadsafe(proxy.stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class _Proxy:
    def __init__(self, host: str, port: int, seconds: float) -> None:
        self._address = host, port
        self._seconds = seconds
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

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
        try:
            there, back = await asyncio.open_connection(*self._address)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._pass_on(reader, back), self._pass_on(there, writer))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Write what is read, later. What comes meanwhile is late by no more."""
        loop = asyncio.get_running_loop()
        on_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def arrive() -> None:
            while True:
                due, data = await on_way.get()
                await asyncio.sleep(due - loop.time())  # sleep: as far as the server is away
                if not data:
                    return
                writer.write(data)
                await writer.drain()

        arriving = asyncio.create_task(arrive())
        try:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(CHUNK):
                    on_way.put_nowait((loop.time() + self._seconds, data))
            on_way.put_nowait((loop.time() + self._seconds, b""))
            with contextlib.suppress(ConnectionError):
                await arriving
        finally:
            arriving.cancel()
            writer.close()
