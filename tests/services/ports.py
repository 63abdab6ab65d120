"""Ports for servers that must come back on the same one after a crash."""

import random
import socket
from pathlib import Path

EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST = 15_000

# pytest-randomly and friends seed the global generator alike in every process, and equal seeds
# would make parallel test runs fight for the same ports.
_random = random.SystemRandom()


def free_port() -> int:
    """A port on 127.0.0.1 that nobody listens on and no outgoing connection will take.

    Below the kernel's ephemeral range: a client that reconnects to a killed server could otherwise
    be given that very port as its own (a TCP self-connect) and keep the server from coming back.
    """
    for _ in range(1_000):
        port = _random.randrange(LOWEST, _first_ephemeral_port())
        with socket.socket() as candidate:
            candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                candidate.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port on 127.0.0.1")


def is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _first_ephemeral_port() -> int:
    try:
        first = int(EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError):
        first = 32_768
    return first if first > LOWEST + 1_000 else 32_768
