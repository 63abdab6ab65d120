"""A server that is slow, as partners are: it has a short queue of connections, answers twenty at
once, and each after a quarter of a second. Prints its port, and serves until it is ended.

python -m tests.acceptance.slow_server
"""

from __future__ import annotations

import asyncio
import socket

from tests.acceptance.manage import die_with_parent

BACKLOG = 16
"""Connections that may wait to be accepted; further ones are ignored for a second or more."""
AT_ONCE, ANSWER = 20, 0.25
"""Requests that are answered at once, and the seconds that each takes: 80 a second."""


async def serve() -> None:
    free = asyncio.Semaphore(AT_ONCE)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readline()
        async with free:
            await asyncio.sleep(ANSWER)
        writer.write(asked)
        writer.close()

    listening = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    server = await asyncio.start_server(answer, sock=listening, backlog=BACKLOG)
    print(listening.getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(serve())
