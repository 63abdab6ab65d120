"""Halve Kafka's start-up by handing the JVM its classes already parsed (class data sharing)."""

import contextlib

from tests.services.errors import ServerFailed
from tests.services.kafka import KafkaServer
from tests.services.maven import kafka_directory


def archive_classes() -> None:
    """Run Kafka once and keep what it loaded.

    An optimisation only: a JVM other than the one that wrote the archive ignores it, and a JVM that
    cannot write one leaves Kafka as it was, about a second slower to start.
    """
    unfinished = kafka_directory() / "classes.jsa.unfinished"
    kafka = KafkaServer(jvm_options=[f"-XX:ArchiveClassesAtExit={unfinished}"])
    try:
        with contextlib.suppress(ServerFailed), kafka:
            kafka.stop()
            if unfinished.exists():
                unfinished.rename(kafka_directory() / "classes.jsa")
    finally:
        unfinished.unlink(missing_ok=True)
