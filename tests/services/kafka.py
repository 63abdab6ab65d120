"""A real Apache Kafka: one process as broker and controller, or several as a cluster."""

import base64
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from tests.services.binaries import find_java, needed
from tests.services.errors import ServerFailed
from tests.services.kafka_settings import broker_settings
from tests.services.maven import class_data_archive, class_path
from tests.services.ports import free_port, is_open
from tests.services.server import Server
from tests.services.tools import ran

JVM_OPTIONS = (
    # Quick to start and easy on a small machine: one collector thread, no optimising compiler.
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:-UsePerfData",
    "-Djava.awt.headless=true",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=HH:mm:ss.SSS",
)


def new_cluster_id() -> str:
    """16 bytes in base64. The prefix keeps "-" from the front, which would make it an option."""
    return base64.urlsafe_b64encode(b"kjo" + os.urandom(13)).decode().rstrip("=")


class KafkaServer(Server):
    """One Kafka process. Topics must be created: `auto.create.topics.enable` is off.

    `settings` are broker properties that override the defaults of `kafka_settings`;
    `jvm_options` come last on the command line and so override `JVM_OPTIONS`.
    """

    name = "kafka"
    start_timeout = 90.0

    def __init__(
        self,
        *,
        node_id: int = 1,
        controller_ports: Mapping[int, int] | None = None,
        cluster_id: str | None = None,
        settings: Mapping[str, str] | None = None,
        heap_mb: int = 512,
        jvm_options: Sequence[str] = (),
        port: int | None = None,
    ) -> None:
        super().__init__(port=port)
        self.node_id = node_id
        self.controller_ports = dict(controller_ports or {node_id: free_port()})
        self.cluster_id = cluster_id or new_cluster_id()
        self.settings = dict(settings or {})
        self.heap_mb = heap_mb
        self.jvm_options = tuple(jvm_options)

    @property
    def url(self) -> str:
        return self.bootstrap_servers

    @property
    def bootstrap_servers(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _prepare(self) -> None:
        settings = broker_settings(
            node_id=self.node_id,
            port=self.port,
            controller_ports=self.controller_ports,
            data=self.directory / "data",
        )
        lines = [f"{name}={value}\n" for name, value in {**settings, **self.settings}.items()]
        self._properties.write_text("".join(lines))
        tool = [*self._java(), "kafka.tools.StorageTool", "format"]
        done = ran(
            [*tool, "-t", self.cluster_id, "-c", str(self._properties), *self._format_options()],
            cwd=self.directory,
        )
        if done.returncode:
            raise ServerFailed(f"Kafka could not format its directory:\n{done.stdout}")

    def _format_options(self) -> Sequence[str]:
        """What else the directory is given, such as users."""
        return ()

    def _command(self) -> Sequence[str]:
        return [*self._java(), "kafka.Kafka", str(self._properties)]

    def _java(self) -> list[str]:
        options = [*JVM_OPTIONS, f"-Xmx{self.heap_mb}m"]
        if archive := class_data_archive():
            options.append(f"-XX:SharedArchiveFile={archive}")
        java = needed("java", find_java())
        return [str(java), "-cp", class_path(), *options, *self.jvm_options]

    def _answers(self) -> bool:
        # A client would back off before its next try, so it is made when the port is open.
        if not is_open(self.port):
            return False
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        client = AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0})
        try:
            answer = client.list_topics(timeout=2)
        except KafkaException:
            return False
        return answer.cluster_id == self.cluster_id and self.node_id in answer.brokers

    @property
    def _properties(self) -> Path:
        return self.directory / "server.properties"


class KafkaCluster:
    """Several brokers, each its own process and each killable: `cluster.nodes[1].kill()`.

    Topics default to one replica per broker, and `min.insync.replicas` to a majority.
    """

    def __init__(self, size: int = 3, *, settings: Mapping[str, str] | None = None) -> None:
        controller_ports = {node_id: free_port() for node_id in range(1, size + 1)}
        cluster_id = new_cluster_id()
        self.nodes = [
            KafkaServer(
                node_id=node_id,
                controller_ports=controller_ports,
                cluster_id=cluster_id,
                settings=settings,
            )
            for node_id in controller_ports
        ]

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(node.bootstrap_servers for node in self.nodes)

    @property
    def url(self) -> str:
        return self.bootstrap_servers

    def start(self) -> Self:
        for node in self.nodes:
            node.launch()
        for node in self.nodes:
            node.wait_ready()
        return self

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def close(self) -> None:
        with ExitStack() as stack:
            for node in self.nodes:
                stack.callback(node.close)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[KafkaServer]:
        return iter(self.nodes)
