"""What two machines hear of one another, as JSON: printed by a process under `network.COMMAND`.

python -m tests.cluster.probe
"""

from __future__ import annotations

import json
import socket
import time

from tests.cluster.network import Machine, make_folder, make_network

PORT = 5000
PACKETS = 200
SILENCE = 0.3
"""Seconds without a packet after which nothing more is expected."""


def opened(machine: Machine) -> socket.socket:
    with machine:
        found = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    found.bind((machine.address, PORT))
    return found


def heard(sender: socket.socket, receiver: socket.socket, count: int, size: int = 10) -> int:
    """Send packets and return how many arrive."""
    for _ in range(count):
        try:
            sender.sendto(bytes(size), receiver.getsockname())
        except PermissionError:
            pass  # dropped on its way out, which a sender of UDP is told
    receiver.settimeout(SILENCE)
    arrived = 0
    try:
        while arrived < count:
            receiver.recv(size)
            arrived += 1
    except TimeoutError:
        pass
    return arrived


def seconds_for(sender: socket.socket, receiver: socket.socket) -> float:
    """Return how long ten packets of 1400 bytes take."""
    began = time.monotonic()
    heard(sender, receiver, 10, 1400)
    return time.monotonic() - began


def main() -> dict[str, object]:
    make_folder()
    one, other, _ = machines = [Machine(f"machine{n}", 10 + n) for n in range(3)]
    make_network(machines)
    here, there, beyond = map(opened, machines)

    def directions() -> tuple[int, int]:
        return heard(here, there, 1), heard(there, here, 1)

    found: dict[str, object] = {"at first": directions()}
    one.cut(hears=False, is_heard=False)
    found["cut"] = directions()
    one.cut(hears=False, is_heard=True)
    found["deaf"] = directions()
    one.cut(hears=True, is_heard=False)
    found["mute"] = directions()
    one.cut([other], hears=False, is_heard=False)
    found["split"] = directions()
    found["split, others"] = heard(here, beyond, 1), heard(beyond, here, 1)
    one.lose(30)
    found["loss"] = heard(here, there, PACKETS), heard(there, here, PACKETS)
    one.connect()
    found["connected"] = directions()
    found["quick"] = seconds_for(here, there)
    one.slow_down()
    found["slow"] = seconds_for(here, there)
    one.speed_up()
    found["quick again"] = seconds_for(here, there)
    return found


if __name__ == "__main__":
    print(json.dumps(main()))
