"""Machines as network namespaces: each has one address, on a bridge that nobody else sees.

The process that makes them is itself in new namespaces (`COMMAND`): network, mounts, processes and
IPC. The kernel removes all of it with the last process, however that ends; nothing has to be
cleaned up, and runs beside one another may have the same names and addresses.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.services.errors import ServerFailed

COMMAND = (
    "unshare",
    "--net",
    "--mount",
    "--ipc",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
)
"""Runs what follows in namespaces of its own, and kills it when it is killed itself."""
NETWORK = "10.77.0"
CONTROL = f"{NETWORK}.1"
"""The address of the process that runs the cluster."""
SLOW_LINK = ("rate", "192kbit", "burst", "3000", "limit", "60000")
"""A queue of 60 kB on a line of 24 kB/s: what is sent waits up to 2.5 s."""

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def obstacle() -> str:
    """Return why there can be no namespaces of our own here, in words; empty where there can."""
    if os.geteuid() != 0:
        return "Network namespaces need root: run these tests as root, in a container or machine"
    rules = "add table inet kjo; add chain inet kjo in { type filter hook input priority 0; }"
    made = f"ip link add switch type bridge && ip link add wire type veth && nft '{rules}'"
    done = subprocess.run([*COMMAND, "sh", "-c", made], capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    return (
        "This machine makes no namespaces with a bridge, veth and nftables (a container needs"
        f" CAP_SYS_ADMIN and CAP_NET_ADMIN): {done.stderr.strip()}"
    )


def _run(*command: str, text: str = "") -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise ServerFailed(f"{' '.join(command)} failed: {done.stdout}{done.stderr}")


def make_folder() -> Path:
    """Return a folder that vanishes with this process. Only for a process under `COMMAND`."""
    # Names of namespaces are files there, too: those of the host stay as they are.
    _run("mount", "-t", "tmpfs", "-o", "mode=755", "none", "/run")
    folder = Path("/run/tests")
    folder.mkdir()
    return folder


def make_network(machines: Sequence[Machine]) -> None:
    """Connect machines, and this process, by a bridge. After `make_folder`."""
    lines = [
        "link set lo up",
        "link add switch type bridge",
        f"address add {CONTROL}/24 dev switch",
        "link set switch up",
    ]
    for machine in machines:
        _run("ip", "netns", "add", machine.name)
        lines += [
            f"link add {machine.name} type veth peer name wire netns {machine.name}",
            f"link set {machine.name} master switch up",
        ]
    _run("ip", "-batch", "-", text="\n".join(lines) + "\n")
    for machine in machines:
        inside = (
            "link set lo up",
            f"address add {machine.address}/24 dev wire",
            "link set wire up",
        )
        _run("ip", "-n", machine.name, "-batch", "-", text="\n".join(inside) + "\n")


class Machine:
    """One network namespace. ``with machine:`` what this thread starts is on it."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.address = f"{NETWORK}.{number}"
        self.is_disturbed = False
        """Whether something is wrong with its network or its disk."""
        self._outside: list[int] = []

    def __enter__(self) -> None:
        self._outside.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
        inside = os.open(Path("/run/netns") / self.name, os.O_RDONLY | os.O_CLOEXEC)
        _enter(inside)
        os.close(inside)

    def __exit__(self, *_: object) -> None:
        outside = self._outside.pop()
        _enter(outside)
        os.close(outside)

    def cut(self, others: Sequence[Machine] = (), *, hears: bool, is_heard: bool) -> None:
        """Drop what comes from other machines, or goes to them; of all, if none is given."""
        which = ", ".join(other.address for other in others) or f"{NETWORK}.0/24"
        rules = []
        if not hears:
            rules.append(f"add rule inet faults in iifname wire ip saddr {{ {which} }} drop")
        if not is_heard:
            rules.append(f"add rule inet faults out oifname wire ip daddr {{ {which} }} drop")
        self._filter(rules)

    def lose(self, percent: int) -> None:
        """Drop a share of the packets, in both directions."""
        dropped = f"numgen random mod 100 < {percent} drop"
        self._filter(
            [
                f"add rule inet faults in iifname wire {dropped}",
                f"add rule inet faults out oifname wire {dropped}",
            ]
        )

    def slow_down(self) -> None:
        """Let packets wait in queues, in both directions."""
        _run("tc", "-n", self.name, "qdisc", "add", "dev", "wire", "root", "tbf", *SLOW_LINK)
        _run("tc", "qdisc", "add", "dev", self.name, "root", "tbf", *SLOW_LINK)
        self.is_disturbed = True

    def speed_up(self) -> None:
        """Undo `slow_down`."""
        _run("tc", "-n", self.name, "qdisc", "del", "dev", "wire", "root")
        _run("tc", "qdisc", "del", "dev", self.name, "root")
        self.is_disturbed = False

    def connect(self) -> None:
        """Undo `cut` and `lose`."""
        self._filter([])

    def _filter(self, rules: list[str]) -> None:
        chains = (
            "add table inet faults",
            "delete table inet faults",
            "add table inet faults",
            "add chain inet faults in { type filter hook input priority 0; }",
            "add chain inet faults out { type filter hook postrouting priority 0; }",
        )
        with self:
            _run("nft", "-f", "-", text="\n".join([*chains, *rules]) + "\n")
        self.is_disturbed = bool(rules)


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, _CLONE_NEWNET):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
