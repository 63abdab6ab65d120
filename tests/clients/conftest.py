"""The service with a worker, and the programs in one language after the other."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Message, TopicPartition

from kjo_django.runtime import get_transport
from kjo_django.transports.base import TopicSpec
from tests.acceptance.engine import Engine, Servers
from tests.clients.consumers import ORDERS, PAYMENTS
from tests.services.clients import LANGUAGES, command_of, java_source
from tests.services.fixtures import require
from tests.services.process import GuardedProcess
from tests.waiting import PATIENCE

BOOTSTRAP = "KAFKA_BOOTSTRAP_SERVERS"
APPENDING = "appending"
"""In the place of a language: a consumer that writes headers as the Java library KDLQ does."""


class Shop(Engine):
    """A service of kjo_django on Kafka, to which others send jobs, events and payments."""

    @property
    def orders(self) -> str:
        """The topic of events that the service handles."""
        return self.topic.replace("ledger-", "orders-")

    def payments(self, language: str) -> str:
        """The topic of payments that it shares with the program in a language."""
        return self.topic.replace("ledger-", f"payments-{language}-")

    def start(self) -> None:
        """Create the topics and start the worker."""
        payments = [self.payments(language) for language in (*LANGUAGES, APPENDING)]
        self.variables |= {
            "DJANGO_SETTINGS_MODULE": "tests.clients.settings",
            ORDERS: self.orders,
            PAYMENTS: json.dumps(payments),
        }
        self.create(self.topic, self.orders, partitions=4)
        for topic in payments:
            self.create(topic, f"{topic}-again", f"{topic}-dlq")
        queues = [name for topic in (self.orders, *payments) for name in (topic, f"{topic}-retry")]
        worker = self.manage("kjo_consume", "ledger", *queues, "--status-interval", "0")
        # It gives the topics more partitions first, which a program that has joined its group
        # before would learn of minutes later.
        self.wait_until(
            lambda: bool(self.partitions_of(worker.pid)), f"{worker} never had a partition"
        )

    def create(self, *topics: str, partitions: int = 1) -> None:
        get_transport().ensure_topics([TopicSpec(topic, partitions) for topic in topics])

    def read(self, topic: str) -> list[Message]:
        """Return all records of a topic."""
        consumer = Consumer({"bootstrap.servers": self.servers.kafka, "group.id": "nobody"})
        try:
            partitions = [
                TopicPartition(topic, number, 0)
                for number in consumer.list_topics(topic, timeout=10).topics[topic].partitions
            ]
            ends = [consumer.get_watermark_offsets(each, timeout=10)[1] for each in partitions]
            consumer.assign(partitions)
            found: list[Message] = []
            while len(found) < sum(ends):
                found += consumer.consume(sum(ends) - len(found), timeout=10)
            return found
        finally:
            consumer.close()


@pytest.fixture(scope="module")
def shop(
    kafka_server: Any,
    sqlite_template: Path,
    tmp_path_factory: pytest.TempPathFactory,
    django_db_blocker: Any,
) -> Iterator[Shop]:
    directory = tmp_path_factory.mktemp("shop")
    database = directory / "kjo.sqlite3"
    shutil.copyfile(sqlite_template, database)
    servers = Servers(f"sqlite:///{database}", kafka_server.bootstrap_servers)
    with django_db_blocker.unblock(), Shop(servers, directory) as shop:
        shop.start()
        yield shop


@pytest.fixture(params=LANGUAGES)
def language(request: pytest.FixtureRequest) -> str:
    """A language whose programs are built."""
    require(clients=[request.param])
    return request.param


@pytest.fixture(params=[*LANGUAGES, APPENDING])
def partner(request: pytest.FixtureRequest) -> str:
    """A language, or the appending consumer, which is one file."""
    require(clients=["java" if request.param == APPENDING else request.param])
    return request.param


def run(language: str, program: str, *arguments: str, kafka: str = "") -> str:
    """Run a program to its end and return what it has printed."""
    done = subprocess.run(
        command_of(language, program, *arguments),
        env={**os.environ, BOOTSTRAP: kafka},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


class Running:
    """A program that runs until it is stopped."""

    def __init__(self, command: list[str], directory: Path) -> None:
        self._log = directory / "log"
        self._process = GuardedProcess(
            command, directory=directory, log=self._log, last_signal=signal.SIGKILL
        )

    @property
    def lines(self) -> list[str]:
        """What it has printed so far; fails if it has ended."""
        found = self._log.read_text().splitlines()
        assert self._process.is_running, "\n".join(found[-40:])
        return found

    def kill(self) -> None:
        self._process.signal(signal.SIGKILL)
        self._process.wait(PATIENCE)


@pytest.fixture
def started(shop: Shop, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Start a program of a language; it is killed after the test."""
    programs = []

    def start(language: str, program: str, *arguments: str) -> Running:
        if language == APPENDING:
            command = java_source(Path(__file__).with_name("AppendingConsumer.java"), *arguments)
        else:
            command = command_of(language, program, *arguments)
        directory = tmp_path / program
        directory.mkdir()
        variables = ["env", f"{BOOTSTRAP}={shop.servers.kafka}"]
        programs.append(Running([*variables, *command], directory))
        return programs[-1]

    yield start
    for program in programs:
        program.kill()
