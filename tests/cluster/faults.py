"""What is done to a machine or a process, and undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.cluster.cluster import Cluster
from tests.cluster.plan import Fault

Undo = Callable[[], object]


def begin(cluster: Cluster, fault: Fault) -> tuple[str, Undo]:
    """Carry out a fault; return the name of its machine, and what ends the fault."""
    target = cluster.find(fault.target, fault.choice)
    if fault.kind == "clock":
        target = cluster.workers[-1]  # the only one whose clock can be set
    undo = _FAULTS[fault.kind](cluster, target, fault)
    return target.machine.name, undo


def _kill(cluster: Cluster, target: Any, fault: Fault) -> Undo:
    if target is cluster.pair.primary:
        target.kill()
        return lambda: None  # its standby takes its place, and it becomes the standby
    cluster.held.add(id(target))
    target.kill()
    return lambda: cluster.held.discard(id(target))


def _freeze(cluster: Cluster, target: Any, fault: Fault) -> Undo:
    target.pause()
    return target.resume


def _cut(cluster: Cluster, target: Any, fault: Fault) -> Undo:
    target.machine.cut(hears=False, is_heard=False)
    return target.machine.connect


def _deaf(cluster: Cluster, target: Any, fault: Fault) -> Undo:
    target.machine.cut(hears=False, is_heard=True)
    return target.machine.connect


def _mute(cluster: Cluster, target: Any, fault: Fault) -> Undo:
    target.machine.cut(hears=True, is_heard=False)
    return target.machine.connect


def _split(cluster: Cluster, target: Any, fault: Fault) -> Undo:
    target.machine.cut(cluster.peers_of(target), hears=False, is_heard=False)
    return target.machine.connect


def _loss(cluster: Cluster, target: Any, fault: Fault) -> Undo:
    target.machine.lose(abs(fault.amount))
    return target.machine.connect


def _delay(cluster: Cluster, target: Any, fault: Fault) -> Undo:
    target.machine.slow_down()
    return target.machine.speed_up


def _full_disk(cluster: Cluster, target: Any, fault: Fault) -> Undo:
    target.fill_disk()
    return target.free_disk


def _clock(cluster: Cluster, target: Any, fault: Fault) -> Undo:
    cluster.clock.write_text(f"{fault.amount:+}")
    return lambda: cluster.clock.write_text("+0")


_FAULTS: dict[str, Callable[[Cluster, Any, Fault], Undo]] = {
    "kill": _kill,
    "freeze": _freeze,
    "cut": _cut,
    "deaf": _deaf,
    "mute": _mute,
    "split": _split,
    "loss": _loss,
    "delay": _delay,
    "full disk": _full_disk,
    "clock": _clock,
}
