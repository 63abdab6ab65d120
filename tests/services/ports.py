"""Ports for servers that must come back on the same one after a crash."""

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST = 15_000

# pytest-randomly and friends seed the global generator alike in every process, and equal seeds
# would make parallel test runs fight for the same ports.
_random = random.SystemRandom()
_given: set[int] = set()
_reserved = os.open(
    Path(tempfile.gettempdir(), f"kjo-test-ports-{os.getuid()}"), os.O_RDWR | os.O_CREAT, 0o600
)
"""Its byte at a port's number is locked by the process that was given the port, as long as that
lives: seconds may pass until its server listens."""


def free_port() -> int:
    """A port on 127.0.0.1 that nobody listens on, that no other call was given, in this or another
    process, and that no outgoing connection will take.

    Below the kernel's ephemeral range: a client that reconnects to a killed server could otherwise
    be given that very port as its own (a TCP self-connect) and keep the server from coming back.
    """
    for _ in range(1_000):
        port = _random.randrange(LOWEST, _first_ephemeral_port())
        if port in _given or not _reserves(port):
            continue
        _given.add(port)
        with socket.socket() as candidate:
            candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                candidate.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port on 127.0.0.1")


def _reserves(port: int) -> bool:
    try:
        fcntl.lockf(_reserved, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    return True


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
