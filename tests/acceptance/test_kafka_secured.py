"""Kafka behind TLS and passwords, as docs/how-to/production.md sets it up: every client of ours is
let in, and whoever is not learns why within seconds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kjo_django.models import DeadLetter
from kjo_django.runtime import get_transport
from kjo_django.transports.base import OutgoingRecord
from tests.acceptance.engine import ALIAS, Engine, Servers
from tests.ledger import jobs
from tests.services import SecuredKafkaServer
from tests.services.fixtures import require
from tests.services.kafka_secured import PASSWORD

pytestmark = [pytest.mark.timeout(120), pytest.mark.kafka, pytest.mark.postgres]

WRONG = "nobody-knows-this-s3cret"


@pytest.fixture(scope="module")
def broker() -> Iterator[SecuredKafkaServer]:
    require(kafka=True)
    with SecuredKafkaServer() as server:
        yield server


@pytest.fixture
def engine(broker: SecuredKafkaServer, database_url: str, tmp_path: Path) -> Iterator[Engine]:
    with Engine(Servers(database_url, broker.secured_servers), tmp_path) as engine:
        engine.kafka_options = broker.client_options()
        engine.configure()
        yield engine


def ends_well(engine: Engine, *arguments: str) -> str:
    """What a command says that succeeds."""
    program = engine.manage(*arguments)
    assert program.wait() == 0, program.log_tail()
    return program.log


def test_every_client_is_let_in(engine: Engine) -> None:
    # When a worker makes its topics, relays, consumes and buries
    worker = engine.ready_worker()
    jobs.write.enqueue_many({"job": f"job-{number}"} for number in range(50))
    jobs.refuse.enqueue(job="dead")
    engine.settle()
    engine.wait_until(lambda: DeadLetter.objects.using(ALIAS).exists(), "It was not buried")
    # Then topics, lag and dead letters can be asked for
    assert ends_well(engine, "kjo_topics", "check")
    health = json.loads(ends_well(engine, "kjo_health", "--json"))
    assert {check["name"] for check in health["checks"] if not check["ok"]} == set()
    dead = f"{engine.topic}-dlq"
    replayed = ends_well(engine, "kjo_replay_dlq", "--source", "topic", "--topic", dead)
    engine.settle()
    assert "1" in replayed
    assert worker.stop() == 0, worker.log_tail()
    engine.assert_each_ran_once([f"job-{number}" for number in range(50)])
    assert all(PASSWORD not in program.log for program in engine.programs)


def test_plain_passwords(engine: Engine) -> None:
    engine.kafka_options["sasl.mechanism"] = "PLAIN"
    engine.configure()
    jobs.write.enqueue(job="job")
    engine.drain()
    engine.assert_each_ran_once(["job"])


def test_a_wrong_password(engine: Engine, broker: SecuredKafkaServer) -> None:
    # Given a job, and a name the broker does not know yet
    engine.create_topics()
    jobs.write.enqueue(job="job")
    engine.kafka_options |= {"sasl.username": "late", "sasl.password": WRONG}
    engine.kafka_options["reconnect.backoff.max.ms"] = 500
    engine.configure()
    # When whoever has a client of Kafka is started
    dead = f"{engine.topic}-dlq"
    running = [engine.worker(), engine.relay()]
    ending = [
        engine.manage(*arguments)
        for arguments in (
            ("kjo_topics", "plan"),
            ("kjo_health",),
            ("kjo_replay_dlq", "--source", "topic", "--topic", dead),
            ("check", "--deploy", "--tag", "kjo", "--fail-level", "WARNING"),
        )
    ]
    # Then each names the settings, without their values, and commands fail
    for program in [*running, *ending]:
        engine.wait_until(
            lambda program=program: (
                "sasl.password" in program.log
                and "KJO['TRANSPORTS']['default']['OPTIONS']" in program.log
            ),
            f"{program} does not say why",
        )
    for program in ending:
        assert program.wait() != 0, program.log_tail()
    # And who publishes directly is told too
    (refused,) = get_transport().publish([OutgoingRecord(engine.topic, b"{}")])
    assert "sasl.password" in str(refused.error)
    # And once it is right, the job runs, with nothing started again
    broker.add_user("late", WRONG)
    engine.settle()
    for program in running:
        assert program.stop() == 0, program.log_tail()
    engine.assert_each_ran_once(["job"])
    assert all(WRONG not in program.log for program in engine.programs)


def test_an_authority_nobody_trusts(engine: Engine, tmp_path: Path) -> None:
    """The broker's certificate is signed by none of those the system knows."""
    del engine.kafka_options["ssl.ca.location"]
    engine.configure()
    asked = engine.manage("kjo_topics", "plan")
    assert asked.wait() != 0
    assert "ssl.ca.location" in asked.log, asked.log_tail()
