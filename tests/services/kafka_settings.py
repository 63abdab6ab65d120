"""Broker properties: a small, quick Kafka that behaves like a large one."""

from collections.abc import Mapping
from pathlib import Path


def broker_settings(
    *, node_id: int, port: int, controller_ports: Mapping[int, int], data: Path
) -> dict[str, str]:
    """Properties of one node of a cluster that has a controller on each of `controller_ports`."""
    replicas = len(controller_ports)
    voters = ",".join(f"{node}@127.0.0.1:{at}" for node, at in sorted(controller_ports.items()))
    broker, controller = f"127.0.0.1:{port}", f"127.0.0.1:{controller_ports[node_id]}"
    return {
        "process.roles": "broker,controller",
        "node.id": str(node_id),
        "controller.quorum.voters": voters,
        "listeners": f"BROKER://{broker},CONTROLLER://{controller}",
        "advertised.listeners": f"BROKER://{broker}",
        "listener.security.protocol.map": "BROKER:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "inter.broker.listener.name": "BROKER",
        "controller.listener.names": "CONTROLLER",
        "log.dirs": str(data),
        "auto.create.topics.enable": "false",
        **_replication(replicas),
        **_TIMING,
        **_SIZE,
    }


def _replication(replicas: int) -> dict[str, str]:
    majority = replicas // 2 + 1
    settings = {"default.replication.factor": replicas, "min.insync.replicas": majority}
    settings["offsets.topic.replication.factor"] = replicas
    for topic in ("transaction.state.log", "share.coordinator.state.topic"):
        settings[f"{topic}.replication.factor"] = replicas
        settings[f"{topic}.min.isr"] = majority
    return {name: str(value) for name, value in settings.items()}


_TIMING = {
    "group.initial.rebalance.delay.ms": "0",
    # A broker that was killed may not register again before its old session has expired, so this
    # is what a restart after kill() waits for (9 s by default).
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "500",
    # Lets tests choose session timeouts of seconds, with both group protocols. In the newer one
    # (KIP-848) the broker decides, not the client, so its defaults are those of a test.
    "group.min.session.timeout.ms": "1000",
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.session.timeout.ms": "6000",
    "group.consumer.min.heartbeat.interval.ms": "100",
    "group.consumer.heartbeat.interval.ms": "500",
    # A deleted topic's files go while the test that made them still runs.
    "log.segment.delete.delay.ms": "1000",
}

_SIZE = {
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "1",
    "share.coordinator.state.topic.num.partitions": "1",
    "num.network.threads": "2",
    "num.io.threads": "4",
    "background.threads": "2",
    "num.recovery.threads.per.data.dir": "1",
    # The cleaner allocates this at start, from the heap; the default is 128 MB.
    "log.cleaner.dedupe.buffer.size": "4194304",
}
