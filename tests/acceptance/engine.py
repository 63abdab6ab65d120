"""An engine of its own for each test: servers, an empty database, and processes of the app on it.

The test's own process plays the web application: it enqueues and looks, through Django, with the
same settings. Workers and relays are real processes, started with `worker` and `relay`. What a
handler did is read from the ledger: each job adds exactly one entry.
"""

from __future__ import annotations

import functools
import json
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.db import DatabaseError, InterfaceError, OperationalError, connections
from django.test import override_settings

from kjo_django.conf import get_settings
from kjo_django.exceptions import KjoError
from kjo_django.models import DeadLetter, Job, JobFailure, TransportMessage
from kjo_django.models import Worker as WorkerRow
from kjo_django.operations.maintenance import topics
from kjo_django.runtime import get_transport
from kjo_django.states import OPEN
from tests.acceptance.forking import suits
from tests.acceptance.program import Program
from tests.ledger.models import Entry
from tests.services.delay import farther
from tests.settings import cache as cache_settings
from tests.settings import database as database_settings
from tests.waiting import PATIENCE, wait_until

ALIAS = "acceptance"
OUTAGES = (OperationalError, InterfaceError, KjoError)

# A crash should cost seconds in a test, not the half minute that suits production.
QUICK: dict[str, Any] = {
    "SERVICE_NAME": "tests",
    "BACKOFF_BASE": 0.2,
    "ERROR_RECOVERY_DELAYS": {},
    "POLL_INTERVAL": 0.5,
    "HEARTBEAT_INTERVAL": 0.5,
    "PROCESSING_TTL": 30,
    "RECORD_LEASE": 2,
    "TOPIC_OPTIONS": {"partitions": 4, "replication_factor": 1},
}
SESSION_TIMEOUT_MS = 1500


@dataclass(frozen=True)
class Servers:
    """Where an engine's parts are; None for those it has in its database."""

    database_url: str
    kafka: str | None = None
    redis: str | None = None


class Engine:
    """Use as a context manager: on leaving, every process started here is ended.

    :param options: keys of ``KJO`` that differ from `QUICK`.
    """

    def __init__(self, servers: Servers, logs: Path, options: dict[str, Any] | None = None) -> None:
        self.servers = servers
        self._logs = logs
        self._suffix = uuid.uuid4().hex[:12]
        self._options = dict(options or {})
        self._override: Any = None
        self.variables: dict[str, str] = {}
        """What else the environment of processes has."""
        self.kafka_options: dict[str, Any] = {}
        """What every client of Kafka is given besides."""
        self.producer_options: dict[str, Any] = {}
        self.other_queues: list[str] = []
        """Queues beside ``ledger``; each has a topic of its own."""
        self.programs: list[Program] = []
        self.forks = True
        """Whether processes of ``manage.py`` are forked, which takes less time: they have the
        namespaces of a server then (`tests.acceptance.forking`), not those of this thread."""

    # --- Settings: the same here and in the processes ---------------------------------------------

    @property
    def topic(self) -> str:
        return f"ledger-{self._suffix}"

    @property
    def is_sqlite(self) -> bool:
        return self.servers.database_url.startswith("sqlite")

    @property
    def group(self) -> str:
        return f"tests-{self._suffix}"

    def _kjo(self) -> dict[str, Any]:
        kjo = {**QUICK, **self._options}
        kjo["QUEUES"] = {
            "ledger": {
                "topic": self.topic,
                "consumer_group": self.group,
                **self._options.get("QUEUES", {}).get("ledger", {}),
            }
        }
        for name in self.other_queues:
            topic = f"{name}-{self._suffix}"
            kjo["QUEUES"][name] = {"topic": topic, "consumer_group": self.group}
        if self.servers.kafka:
            kjo["TRANSPORTS"] = {
                "default": {
                    "BACKEND": "kjo_django.transports.kafka.KafkaTransport",
                    "OPTIONS": {
                        "bootstrap.servers": self.servers.kafka,
                        "request_timeout": timedelta(seconds=5),
                        "producer": self.producer_options,
                        "consumer": {
                            "session.timeout.ms": SESSION_TIMEOUT_MS,
                            "heartbeat.interval.ms": 300,
                        },
                        **self.kafka_options,
                    },
                }
            }
        if self.servers.redis:
            kjo["COORDINATION"] = {
                "BACKEND": "kjo_django.coordination.redis.RedisCoordination",
                "OPTIONS": {"CACHE": "default", "KEY_PREFIX": f"{self._suffix}:"},
            }
        return kjo

    def configure(self, **options: Any) -> None:
        """Change keys of ``KJO`` for what is started from now on."""
        self._options.update(options)
        if self._override is not None:
            self._override.disable()
        caches = dict(settings.CACHES)
        if self.servers.redis:
            caches["default"] = cache_settings(self.servers.redis)
        self._override = override_settings(KJO={**self._kjo(), "DATABASE": ALIAS}, CACHES=caches)
        self._override.enable()

    def environment(self) -> dict[str, str]:
        """What a process needs to find this engine."""
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("KAFKA_BOOTSTRAP_SERVERS", "REDIS_URL")
        }
        environment |= {
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "DATABASE_URL": self.servers.database_url,
            "KJO_TEST_SETTINGS": json.dumps(self._kjo(), default=timedelta.total_seconds),
            "KJO_TEST_LOG_LEVEL": "INFO",
            "PYTHONUNBUFFERED": "1",
        }
        if self.servers.redis:
            environment["REDIS_URL"] = self.servers.redis
        return environment | self.variables

    def __enter__(self) -> Engine:
        connections.settings[ALIAS] = connections.configure_settings(
            {"default": {}, ALIAS: database_settings(self.servers.database_url)}
        )[ALIAS]
        self.configure()
        return self

    def __exit__(self, *_: object) -> None:
        for program in self.programs:
            program.end()
        self._override.disable()
        connections[ALIAS].close()
        del connections[ALIAS]
        del connections.settings[ALIAS]

    @contextmanager
    def database_away(self, seconds: float) -> Iterator[None]:
        """Have the database so far from the processes that a round trip takes so much longer."""
        url = urlsplit(self.servers.database_url)
        with farther(str(url.hostname), int(url.port or 0), seconds / 2) as port:
            far = url._replace(netloc=url.netloc.replace(f":{url.port}", f":{port}"))
            self.variables["DATABASE_URL"] = far.geturl()
            yield
            del self.variables["DATABASE_URL"]

    # --- Processes --------------------------------------------------------------------------------

    def run(self, *arguments: str, folder: Path | None = None, forked: bool = False) -> Program:
        """Start ``python -m …`` on this engine.

        :param folder: whose code it runs; by default this repository's.
        :param forked: fork it, unless its environment is for a new interpreter.
        """
        log = self._logs / f"{len(self.programs):03}-{arguments[0].rpartition('.')[2]}.log"
        environment = self.environment()
        forked = forked and suits(environment)
        program = Program(arguments, environment, log, folder, forked=forked)
        self.programs.append(program)
        return program

    def manage(self, *arguments: str) -> Program:
        """Start ``manage.py …``."""
        return self.run("tests.acceptance.manage", *arguments, forked=self.forks)

    def worker(self, *arguments: str) -> Program:
        """Start a worker of the ledger, without waiting for it."""
        return self.manage("kjo_consume", "ledger", "--status-interval", "0", *arguments)

    def ready_worker(self, *arguments: str) -> Program:
        """Start a worker and wait until it can be given jobs."""
        worker = self.worker(*arguments)
        self.wait_until(
            lambda: bool(self.partitions_of(worker.pid)), f"{worker} never had a partition"
        )
        return worker

    def freeze(self, worker: Program) -> None:
        """Stop a worker, but not while it has locked the file of SQLite, or rows of MariaDB: nobody
        could use these, and what is asked here is what others do meanwhile."""

        def stopped() -> bool:
            worker.freeze()
            try:
                with connections[ALIAS].cursor() as cursor:
                    if connections[ALIAS].vendor == "sqlite":
                        cursor.execute("PRAGMA busy_timeout = 200")
                        # Who reads keeps others from committing, and these everybody from reading.
                        cursor.execute("BEGIN EXCLUSIVE")
                        cursor.execute("ROLLBACK")
                    if connections[ALIAS].vendor == "mysql":
                        raise_if_rows_stay_locked(cursor)
            except OperationalError:
                worker.thaw()
                raise
            finally:
                connections[ALIAS].close()
            return True

        self.wait_until(stopped, f"{worker} never left the database alone")

    def partitions_of(self, pid: int) -> list[Any]:
        """The partitions the worker process last said it has."""
        return [
            partition
            for row in WorkerRow.objects.using(ALIAS).filter(pid=pid, state="running")
            for partition in row.partitions
        ]

    def settled_count(self, pid: int) -> int:
        """How many messages the worker process last said it has settled."""
        rows = WorkerRow.objects.using(ALIAS).filter(pid=pid)
        return sum(rows.values_list("processed_count", flat=True))

    def has_in_flight(self, pid: int, count: int) -> bool:
        """Whether the worker process said it holds as many messages, waiting and running."""
        rows = WorkerRow.objects.using(ALIAS)
        return bool(rows.filter(pid=pid, in_flight_count__gte=count).exists())

    def relay(self, *arguments: str) -> Program:
        """Start a relay of its own."""
        return self.manage("kjo_produce", *arguments)

    def drain(self, *arguments: str, timeout: float = PATIENCE) -> Program:
        """Run a worker until nothing that is due is left."""
        worker = self.worker("--drain", *arguments)
        assert worker.wait(timeout) == 0, worker.log_tail()
        return worker

    def create_topics(self) -> None:
        """Make the topics a worker would make, for tests that publish before there is one."""
        topics.create(["ledger"])

    # --- Looking ----------------------------------------------------------------------------------

    def wait_until(
        self, condition: Callable[[], Any], complaint: str, patience: float = PATIENCE
    ) -> Any:
        """Return the first true answer. A database that is away means not yet.

        :param complaint: what to say when there is none.
        """

        @functools.wraps(condition)
        def answer() -> Any:
            try:
                return condition()
            except OUTAGES:
                with suppress(DatabaseError):
                    connections[ALIAS].close()
                raise

        return wait_until(answer, complaint, unless=OUTAGES, patience=patience)

    def wait_for_moment(self, seconds: float) -> None:
        """Let a random time pass: the moment of a crash, not a synchronisation."""
        time.sleep(seconds)  # sleep: so that what follows comes at no moment of its own

    @property
    def jobs(self) -> Any:
        return Job.objects.using(ALIAS)

    @property
    def dead_letters(self) -> Any:
        return DeadLetter.objects.using(ALIAS)

    @property
    def failures(self) -> Any:
        return JobFailure.objects.using(ALIAS)

    @property
    def entries(self) -> Any:
        return Entry.objects.using(ALIAS)

    def ledger(self) -> Counter[str]:
        """How many entries each job has added."""
        return Counter(self.entries.values_list("job", flat=True))

    def lag(self) -> int:
        """Messages nobody has acknowledged."""
        if not self.servers.kafka:
            return TransportMessage.objects.using(ALIAS).count()
        queue = get_settings().queue("ledger")
        return sum(get_transport().lag([queue.topic], queue.consumer_group).values())

    def is_settled(self) -> bool:
        """Whether nothing is left to run, duplicates on the way included."""
        return not self.jobs.filter(state__in=OPEN).exists() and self.lag() == 0

    def settle(self, patience: float = PATIENCE) -> None:
        """Wait until nothing is left to run."""
        try:
            self.wait_until(self.is_settled, "Not everything was settled", patience)
        except AssertionError as error:
            left = list(
                self.jobs.filter(state__in=OPEN).values_list(
                    "handler", "state", "attempts", "available_at", "lease_token", "error"
                )[:10]
            )
            raise AssertionError(f"{error}: lag {self.lag()}, open jobs {left}") from None

    def assert_each_ran_once(self, names: Iterable[str], *, unsure: Iterable[str] = ()) -> None:
        """The invariant: nothing lost, nothing twice.

        :param unsure: jobs whose enqueue failed in a way that leaves open whether it took place.
        """
        entries = self.ledger()
        certain = set(names)
        lost = sorted(certain - entries.keys())
        doubled = {name: count for name, count in entries.items() if count > 1}
        strange = sorted(entries.keys() - certain - set(unsure))
        letters = list(self.dead_letters.values_list("handler", "reason", "error")[:5])
        assert (lost, doubled, strange) == ([], {}, []), (
            f"of {len(certain)} jobs lost {len(lost)}: {lost[:5]}, "
            f"ran twice {len(doubled)}: {dict(list(doubled.items())[:5])}, "
            f"never enqueued {len(strange)}: {strange[:5]}; dead letters {letters}"
        )

    def report(self) -> str:
        """The ends of all logs, for a test that failed."""
        return "\n\n".join(
            f"--- {program}\n{program.log_tail()}" for program in self.programs[-12:]
        )


def raise_if_rows_stay_locked(cursor: Any) -> None:
    """Raise where a transaction of MariaDB holds locks for longer than those of workers last."""

    def locking() -> set[Any]:
        transactions = "information_schema.innodb_trx"
        cursor.execute(f"SELECT trx_id FROM {transactions} WHERE trx_lock_structs > 0")
        return set(cursor.fetchall())

    before = locking()
    time.sleep(0.3)  # sleep: longer than a transaction of a worker lasts
    if before & locking():
        raise OperationalError("A transaction has locked rows")
