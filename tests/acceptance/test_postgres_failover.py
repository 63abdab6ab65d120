"""PostgreSQL's primary is lost, or retired, while workers work, and its synchronous standby takes
its place: whoever was told that a job is stored finds it run, and none takes effect twice."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from django.db import DatabaseError, InterfaceError, connections, transaction

from kjo_django.exceptions import KjoError
from tests.acceptance.engine import ALIAS, Engine, Servers
from tests.acceptance.load import Load
from tests.acceptance.program import Program
from tests.databases import copied_database, migrate
from tests.ledger import jobs
from tests.ledger.models import Entry
from tests.services import PgBouncerServer
from tests.services.fixtures import require
from tests.services.postgres_pair import PostgresPair
from tests.settings import database as settings_of

pytestmark = [pytest.mark.timeout(120), pytest.mark.postgres]

KILLS = 20
WRITERS = 3
SAID = "is another server now"


@pytest.fixture(scope="module")
def _pair(django_db_setup: None, django_db_blocker: Any) -> Iterator[PostgresPair]:
    require(postgres=True)
    with PostgresPair() as servers:
        with django_db_blocker.unblock():
            migrate(settings_of(servers.createdb("kjo_template")))
        yield servers


@pytest.fixture
def pair(_pair: PostgresPair) -> Iterator[PostgresPair]:
    """Both whole before the test, and after it."""
    yield _pair
    _pair.restore()


@pytest.fixture(params=["database", pytest.param("kafka", marks=pytest.mark.kafka)])
def engine(
    request: pytest.FixtureRequest, pair: PostgresPair, tmp_path: Path, django_db_blocker: Any
) -> Iterator[Engine]:
    """Jobs go by the database itself, or by Kafka; there is no server besides."""
    kafka = None
    if request.param == "kafka":
        kafka = request.getfixturevalue("kafka_server").bootstrap_servers
    with (
        django_db_blocker.unblock(),
        copied_database(pair, "kjo_template") as url,
        Engine(Servers(url, kafka), tmp_path) as engine,
    ):
        yield engine


@pytest.fixture
def pooler(pair: PostgresPair) -> Iterator[PgBouncerServer]:
    require(pgbouncer=True)
    with PgBouncerServer(pair.primary.url) as server:
        yield server


@pytest.fixture
def pooled(
    pair: PostgresPair, pooler: PgBouncerServer, tmp_path: Path, django_db_blocker: Any
) -> Iterator[Engine]:
    """Every process knows one server only: the pooler."""
    with django_db_blocker.unblock(), copied_database(pair, "kjo_template") as url:
        address = f"{pooler.through(url)}&application_name=tests"
        with Engine(Servers(address), tmp_path) as engine:
            yield engine


def order(job: str) -> str:
    """Return the name of the row that is stored with a job."""
    return f"order of {job}"


class Orders(Load):
    """Stores a row of its own and jobs in one transaction, each once, whatever becomes of it."""

    def __init__(self, rate: float, prefix: str) -> None:
        super().__init__(rate, prefix=prefix)
        self.unanswered: dict[str, set[str]] = {}
        """Orders whose COMMIT was not answered, and their jobs."""

    def _enqueue(self, kind: Callable[[str], set[str]], name: str) -> None:
        names: set[str] = set()
        try:
            with transaction.atomic(using=ALIAS):
                Entry.objects.using(ALIAS).create(job=order(name))
                names = kind(name)
                is_complete = True
        except (DatabaseError, InterfaceError, KjoError):
            self.refusals += 1
            if names:
                self.unanswered[order(name)] = names
            connections[ALIAS].close()
            self._stopping.wait(0.02)
        else:
            assert is_complete
            self.expected |= {order(name), *names}


@dataclass
class Found:
    """What has become of all that was committed."""

    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    """Orders without their jobs, or jobs without their order."""
    took_effect: int = 0
    """Of the transactions whose COMMIT was not answered."""


def audit(engine: Engine, loads: list[Orders]) -> Found:
    """Compare the database with what clients were told."""
    entries: Counter[str] = engine.ledger()
    found = Found(doubled=sorted(name for name, count in entries.items() if count > 1))
    for load in loads:
        found.lost += sorted(load.expected - entries.keys())
        for name, names in load.unanswered.items():
            has_run = {each in entries for each in names}
            if has_run != {name in entries}:
                found.torn.append(name)
            found.took_effect += name in entries
    return found


@pytest.fixture
def loads() -> Iterator[list[Orders]]:
    """Web processes under way."""
    with ExitStack() as stack:
        yield [stack.enter_context(Orders(25, f"web{number}")) for number in range(WRITERS)]


def processes(engine: Engine) -> list[Program]:
    """Start two workers, and a relay where there is something to relay."""
    if not engine.servers.kafka:
        return [engine.ready_worker("--concurrency", "2") for _ in range(2)]
    engine.create_topics()
    workers = [engine.ready_worker("--concurrency", "2", "--no-relay") for _ in range(2)]
    return [engine.relay(), *workers]


def goes_on(engine: Engine, loads: list[Orders]) -> float:
    """Wait until a job has run that was enqueued after the call; return the seconds."""
    began = time.monotonic()
    before = {name for load in loads for name in load.expected.copy()}

    def has_run() -> bool:
        connections[ALIAS].close()  # it may lead to the server that was retired
        new = [name for load in loads for name in load.expected.copy() if name not in before]
        return engine.entries.filter(job__in=new, job__startswith="web").exists()

    engine.wait_until(has_run, "Nothing runs")
    return time.monotonic() - began


def say_so(engine: Engine, programs: list[Program], times: int = 1) -> None:
    """Wait until each process has said that it found another server: it does so when it needs the
    database next, which a worker may not while others take all that is due."""

    def have_said() -> bool:
        return all(program.log.count(SAID) >= times for program in programs)

    engine.wait_until(have_said, f"Not every process has said {times} times: {SAID!r}")


def end(engine: Engine, programs: list[Program], loads: list[Orders]) -> Found:
    """Let everything come to its end, and every process stop as it should."""
    for load in loads:
        load.stop()
    engine.settle()
    for program in programs:
        assert program.stop() == 0, program.log_tail()
    return audit(engine, loads)


@pytest.mark.promise("synchronous-standby")
def test_the_primary_is_killed_under_load(
    pair: PostgresPair, engine: Engine, loads: list[Orders]
) -> None:
    # Given workers under load
    programs = processes(engine)
    goes_on(engine, loads)
    # When the primary is killed, and its standby promoted
    pair.kill_primary()
    pair.promote()
    # Then jobs go on, also when the new primary has a standby
    goes_on(engine, loads)
    pair.restore()
    goes_on(engine, loads)
    # And each process says what has happened
    say_so(engine, programs)
    found = end(engine, programs, loads)
    # And what was committed took effect once
    assert (found.lost, found.doubled, found.torn) == ([], [], [])
    for program in programs:
        assert "Traceback" not in program.log


def test_the_primary_is_retired_under_load(
    pair: PostgresPair, engine: Engine, loads: list[Orders]
) -> None:
    """It stays up and keeps its sessions, but takes no writes: whoever stays connected sees old
    rows only."""
    # Given workers under load
    programs = processes(engine)
    goes_on(engine, loads)
    # When the primary takes no more writes, and its standby is promoted
    pair.retire_primary()
    pair.promote()
    # Then jobs go on, and each process says what has happened
    goes_on(engine, loads)
    say_so(engine, programs)
    found = end(engine, programs, loads)
    assert (found.lost, found.doubled, found.torn) == ([], [], [])
    # And no attempt was spent on it
    assert not engine.failures.exclude(error_type__endswith="RuntimeError").exists()
    for program in programs:
        assert "Traceback" not in program.log


def test_the_primary_is_retired_while_nothing_happens(pair: PostgresPair, engine: Engine) -> None:
    """Who only reads meets no error there."""
    # Given workers with nothing to do, that look by themselves twice a second
    programs = processes(engine)
    jobs.write.enqueue(job="before")
    engine.settle()
    # When the primary is retired, and a job is stored on the new one
    pair.retire_primary()
    pair.promote()
    connections[ALIAS].close()
    jobs.write.enqueue(job="after")
    # Then it is found
    engine.wait_until(lambda: engine.entries.filter(job="after").exists(), "Nobody finds it")
    engine.settle()
    for program in programs:
        assert program.stop() == 0, program.log_tail()
    engine.assert_each_ran_once(["before", "after"])


@pytest.mark.long
def test_the_standby_is_away_under_load(
    pair: PostgresPair, engine: Engine, loads: list[Orders]
) -> None:
    """Nobody is told that anything is stored meanwhile: commits wait."""
    # Given workers under load
    programs = processes(engine)
    goes_on(engine, loads)
    # When the standby dies
    pair.standby.kill()
    engine.wait_until(pair.has_waiting_commits, "Nobody waits for the standby")
    # Then jobs go on when it is back
    pair.standby.start()
    goes_on(engine, loads)
    found = end(engine, programs, loads)
    assert (found.lost, found.doubled, found.torn) == ([], [], [])
    for program in programs:
        assert SAID not in program.log


def test_wake_ups_come_from_the_new_primary(pair: PostgresPair, engine: Engine) -> None:
    # Given processes that look by themselves once in ten minutes
    engine.configure(POLL_INTERVAL=600)
    programs = processes(engine)
    # When the primary was killed, and jobs are enqueued on the new one
    pair.kill_primary()
    pair.promote()
    connections[ALIAS].close()
    # Then each is called for: also the second, when nobody has a reason to look any more
    for name in ("first", "second"):
        jobs.write.enqueue(job=name)
        engine.wait_until(
            lambda name=name: engine.entries.filter(job=name).exists(), "It was not called", 20
        )
    engine.settle()
    for program in programs:
        assert program.stop() == 0, program.log_tail()
    engine.assert_each_ran_once(["first", "second"])


@pytest.mark.parametrize("lose", [PostgresPair.kill_primary, PostgresPair.retire_primary])
def test_a_pooler_is_switched_over_under_load(
    lose: Callable[[PostgresPair], None],
    pair: PostgresPair,
    pooler: PgBouncerServer,
    pooled: Engine,
    loads: list[Orders],
) -> None:
    # Given workers under load that know one address only
    programs = processes(pooled)
    goes_on(pooled, loads)
    # When the primary is lost, and the pooler leads to the one that took its place
    lose(pair)
    pair.promote()
    pooler.lead_to(pair.primary.url)
    # Then jobs go on, and each process says what has happened
    goes_on(pooled, loads)
    say_so(pooled, programs)
    found = end(pooled, programs, loads)
    assert (found.lost, found.doubled, found.torn) == ([], [], [])
    for program in programs:
        assert "Traceback" not in program.log


@pytest.mark.promise("synchronous-standby")
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_primary_is_killed_twenty_times(
    pair: PostgresPair,
    engine: Engine,
    loads: list[Orders],
    record_property: Callable[[str, object], None],
) -> None:
    # Given workers under load
    programs = processes(engine)
    goes_on(engine, loads)
    # When one primary after the other is killed, each with a synchronous standby
    took = []
    for number in range(KILLS):
        killed_at = time.monotonic()
        pair.kill_primary()
        pair.promote()
        promoted_in = time.monotonic() - killed_at
        took.append(promoted_in + goes_on(engine, loads))
        pair.restore()
        goes_on(engine, loads)
        say_so(engine, programs, number + 1)
    found = end(engine, programs, loads)
    # Then what was committed took effect once
    stored = sum(len(load.expected) for load in loads)
    unanswered = sum(len(load.unanswered) for load in loads)
    attempts = engine.failures.exclude(error_type__endswith="RuntimeError").count()
    facts = {
        "kills": KILLS,
        "committed": stored,
        "lost": len(found.lost),
        "doubled": len(found.doubled),
        "torn": len(found.torn),
        "unanswered": unanswered,
        "of these committed": found.took_effect,
        "failed attempts": attempts,
        "median": f"{statistics.median(took):.1f} s",
        "longest": f"{max(took):.1f} s",
    }
    print("\n" + ", ".join(f"{name} {value}" for name, value in facts.items()))
    for name, value in facts.items():
        record_property(name, value)
    assert (found.lost, found.doubled, found.torn) == ([], [], [])
    # And each process has told of each new primary once
    assert [program.log.count(SAID) for program in programs] == [KILLS] * len(programs)
