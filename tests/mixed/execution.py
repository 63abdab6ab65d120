"""Carrying out a plan: processes are started, killed and frozen, servers disturbed, the end awaited
and the evidence collected."""

from __future__ import annotations

import itertools
import os
import random
import re
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import redis
from django.db import DatabaseError, InterfaceError, OperationalError, connections

from kjo_django.exceptions import KjoError, import_path
from kjo_django.models import Lease as LeaseRow
from kjo_django.models import TransportMessage
from kjo_django.models import Worker as WorkerRow
from kjo_django.runtime import get_transport
from kjo_django.states import OPEN
from kjo_django.transports.base import Record
from tests.acceptance.engine import ALIAS, Engine, Servers
from tests.acceptance.moments import Moment
from tests.acceptance.program import Program
from tests.busy import burning
from tests.items.models import Item
from tests.mixed import invariants, names, sessions, trace
from tests.mixed.plan import BUSY, PHASE, Move, Plan
from tests.waiting import PATIENCE, wait_until

LANES = "8"
"""More than the plan keeps busy for long: an idle queue never waits for a lane."""
MORE_LANES = "16"
"""Where the database is far, so that each job keeps its lane for longer."""
FAR = 0.012
"""Seconds of a round trip from which on a worker with its defaults has more lanes, too."""
FEWER_LANES = "5"
"""On SQLite, where a lane mostly waits for others to have written."""
END = 90.0
"""Seconds in which nothing more has come to its end, and something is left: it is stuck."""
MEMORY = "kjo_django.transports.memory.MemoryTransport"
STREAMS = "kjo_django.transports.redis_streams.RedisStreamsTransport"


class MixedEngine(Engine):
    """An engine whose processes know the handlers of the mixed load, and note what they do."""

    def __init__(self, plan: Plan, servers: Servers, logs: Path) -> None:
        super().__init__(servers, logs, {"TOPIC_OPTIONS": {"partitions": 2, **REPLICAS}})
        self.plan = plan
        self.mark = self._suffix
        self.trace_file = logs / "trace"
        self.trace_file.touch()
        Path(f"{self.trace_file}.begun").mkdir()
        self.variables = {names.RUN: self.mark, trace.FILE: str(self.trace_file)}

    def _kjo(self) -> dict[str, Any]:
        kjo = super()._kjo()
        if self.plan.engine.transport in BACKENDS:
            kjo["TRANSPORTS"] = {"default": {"BACKEND": BACKENDS[self.plan.engine.transport]}}
        if self.plan.is_limited:
            kjo["HEARTBEAT_INTERVAL"] = self.plan.engine.heartbeat
        return {
            **kjo,
            "SERVICE_NAME": f"mixed-{self.mark}",
            "QUEUES": names.queue_settings(self.mark),
            "BACKOFF_MAX": 1,
            "ERROR_RECOVERY_DELAYS": {"rate_limit": 0.5},
            "MAX_OUTSTANDING": 60,
            "SHUTDOWN_GRACE": 20,
            "PROCESSING_TTL": 20,
        }

    def note(self, word: str, *values: object) -> None:
        trace.note_in(self.trace_file, word, *values)

    def lines(self) -> Iterable[trace.Line]:
        return trace.read(self.trace_file)

    # --- The end ----------------------------------------------------------------------------------

    def lag(self) -> int:
        if self.plan.engine.transport == "memory":
            return sum(line.word == "unread" for line in self.lines())
        if self.plan.engine.transport == "database":
            return self.messages.exclude(topic=names.topic("others", self.mark)).count()
        topics = names.consumed_topics(self.mark)
        return sum(get_transport().lag(topics, names.group(self.mark)).values())

    def is_settled(self) -> bool:
        return super().is_settled() and not self.items.filter(state=1).exists()

    @property
    def messages(self) -> Any:
        """What the database transport holds."""
        return TransportMessage.objects.using(ALIAS)

    @property
    def items(self) -> Any:
        return Item.objects.using(ALIAS)


REPLICAS = {"replication_factor": 1}
BACKENDS = {"memory": MEMORY, "redis_streams": STREAMS}


# --- Who works ------------------------------------------------------------------------------------


class Stage(ABC):
    """Workers that come and go. What is done to them is noted as a disturbance."""

    def __init__(self, engine: MixedEngine) -> None:
        self.engine = engine
        self.random = random.Random(f"{engine.plan.seed} stage")
        self._numbers = itertools.count()
        self.complaints: list[str] = []

    @abstractmethod
    def start(self) -> None:
        """Start the first workers and the application, and let it begin once they are ready."""

    def carry_out(self, move: Move) -> None:
        """Do what a move says; return when it is over."""
        getattr(self, f"_do_{move.what}")(move)

    def _do_busy(self, move: Move) -> None:
        """Take the processors away. Nobody is disturbed: how much slower all is, is measured."""
        with burning(BUSY):
            time.sleep(move.seconds)  # sleep: as long as the plan says

    @abstractmethod
    def look_after(self) -> None:
        """Replace workers that ended by themselves. Called often."""

    @property
    @abstractmethod
    def is_enqueued(self) -> bool:
        """Whether the application has done its part."""

    @abstractmethod
    def stop(self) -> None:
        """Stop every worker in order."""

    @contextmanager
    def disturbing(self, what: str) -> Iterator[None]:
        """Note from when to when something is done to workers or servers."""
        mark = f"{what}-{next(self._numbers)}"
        self.engine.note("disturb", mark)
        try:
            yield
        finally:
            self.engine.note("disturbed", mark)


class ProcessStage(Stage):
    """Workers, relays and the application are processes."""

    def __init__(self, engine: MixedEngine) -> None:
        super().__init__(engine)
        self._workers: list[Program] = []
        self._leaving: list[Program] = []
        self._frozen: set[Program] = set()
        self._relays: list[Program] = []
        self._application: Program | None = None
        # A process of ours ends with the thread that started it: this one outlives every move.
        self._starter = ThreadPoolExecutor(1)
        self._lock = threading.RLock()

    def start(self) -> None:
        plan = self.engine.plan
        phases = str(round(plan.seconds / PHASE))
        self._application = self._run(
            "tests.mixed.application", str(plan.seed), plan.engine.name, phases
        )
        for _ in range(2):
            self._join()
        for worker in self._workers:
            self._wait_ready(worker)
            assert worker.is_running, worker.log_tail()
        time.sleep(0.5)  # sleep: the second one's coming moves partitions of the first
        Path(f"{self.engine.trace_file}.ready").touch()

    def _run(self, *arguments: str) -> Program:
        return self._starter.submit(self.engine.run, *arguments).result()

    def _join(self) -> Program:
        lanes = FEWER_LANES if self.engine.is_sqlite else LANES
        lanes = MORE_LANES if self.engine.plan.away >= FAR else lanes
        options = ["--concurrency", lanes, "--status-interval", "0"]
        worker = self._run("tests.mixed.manage", "kjo_consume", *options)
        with self._lock:
            self._workers.append(worker)
        return worker

    def _wait_ready(self, worker: Program) -> None:
        self.engine.wait_until(
            lambda: self._is_ready(worker) or not worker.is_running,
            f"{worker} never had a partition",
        )

    def _is_ready(self, worker: Program) -> bool:
        rows = WorkerRow.objects.using(ALIAS).filter(pid=worker.pid, state="running")
        return worker.is_running and any(row.partitions for row in rows)

    def _wait_for_two(self) -> None:
        """Wait until a worker is there that will miss the signs of life of another one. What the
        last one held waits for as long as its leases last."""
        self.engine.wait_until(
            lambda: sum(map(self._is_ready, list(self._workers))) > 1, "There is only one worker"
        )

    @property
    def is_enqueued(self) -> bool:
        assert self._application is not None
        if not self._application.is_running and self._application.wait() != 0:
            raise AssertionError(f"The application failed:\n{self._application.log_tail()}")
        return not self._application.is_running

    def look_after(self) -> None:
        with self._lock:
            for worker in [one for one in self._workers if not one.is_running]:
                with self.disturbing("death"):
                    self._workers.remove(worker)
                    self._note_killed(worker)
                if worker.wait() != -9:
                    self.complaints.append(f"{worker} ended with {worker.wait()}")
                threading.Thread(target=self._join_and_wait).start()
            for worker in [one for one in self._leaving if not one.is_running]:
                self._leaving.remove(worker)
                if worker.wait() != 0:
                    self.complaints.append(f"{worker} was asked to stop, ended {worker.wait()}")
            for relay in [one for one in self._relays if not one.is_running]:
                self._relays.remove(relay)

    def _note_killed(self, worker: Program) -> None:
        self.engine.note("killed", worker.pid)

    def _choose(self) -> Program:
        return self.random.choice([one for one in self._workers if one not in self._frozen])

    def _join_and_wait(self) -> None:
        """Start a worker; it disturbs when it is there, for then partitions move."""
        try:
            self._wait_ready(self._join())
            with self.disturbing("ready"):
                pass
        finally:
            connections.close_all()

    def _do_join(self, move: Move) -> None:
        if len(self._workers) < 3:
            self._join_and_wait()

    def _do_kill(self, move: Move) -> None:
        self._wait_for_two()
        with self.disturbing("kill"), self._lock:
            worker = self._choose()
            worker.kill()
            self._workers.remove(worker)
            self._note_killed(worker)
        self._join_and_wait()

    def _do_leave(self, move: Move) -> None:
        with self._lock:
            worker = self._choose()
            self._workers.remove(worker)
        # One that still imports has no handler for the signal, and would end by it.
        self._wait_ready(worker)
        with self.disturbing("leave"):
            with self._lock:
                worker.terminate()
                self._leaving.append(worker)
            wait_until(lambda: not worker.is_running, f"{worker} ends")
        self._join_and_wait()

    def _do_freeze(self, move: Move) -> None:
        with self.disturbing("freeze"):
            with self._lock:
                worker = self._choose()
                self._frozen.add(worker)
            self.engine.note("frozen", worker.pid)
            worker.freeze()
            time.sleep(move.seconds + 1.5)  # sleep: as the plan says
            worker.thaw()
            self.engine.note("thawed", worker.pid)
            with self._lock:
                self._frozen.discard(worker)

    def _do_relay(self, move: Move) -> None:
        self._relays.append(self._run("tests.mixed.manage", "kjo_produce"))

    def _do_flush(self, move: Move) -> None:
        assert self.engine.servers.redis is not None
        with self.disturbing("flush"):
            redis.Redis.from_url(self.engine.servers.redis).flushall()

    def _do_end_sessions(self, move: Move) -> None:
        """End about half of the sessions of the database."""
        with self.disturbing("end_sessions"):
            sessions.end_some(self.engine.servers.database_url, self.random)

    def _do_hold_rows(self, move: Move) -> None:
        """Hold rows of the outbox while they are sent, as other transactions may."""
        url = self.engine.servers.database_url
        with self.disturbing("hold_rows"), ThreadPoolExecutor(3) as pool:
            for holding in [pool.submit(sessions.hold_rows, url, move.seconds) for _ in range(3)]:
                holding.result()

    def stop(self) -> None:
        for program in self._relays:
            program.terminate()
        for program in self._workers:
            program.terminate()
        for program in [*self._workers, *self._leaving]:
            try:
                code = program.wait(PATIENCE)
            except AssertionError as error:
                self.complaints.append(str(error))
            else:
                if code != 0:
                    self.complaints.append(f"{program} ended with {code}:\n{program.log_tail()}")
        self._starter.shutdown()


class ThreadStage(Stage):
    """Everything is one process: workers are its threads, and it carries out the moves itself."""

    def start(self) -> None:
        plan = self.engine.plan
        phases = str(round(plan.seconds / PHASE))
        self._program = self.engine.run(
            "tests.mixed.together", str(plan.seed), plan.engine.name, phases
        )

    def carry_out(self, move: Move) -> None:
        """It does so itself, what is done to itself."""
        if move.what == "busy":
            super().carry_out(move)

    def look_after(self) -> None:
        """There is nobody to look after."""

    @property
    def is_enqueued(self) -> bool:
        if not self._program.is_running and self._program.wait() != 0:
            raise AssertionError(f"The process failed:\n{self._program.log_tail()}")
        return not self._program.is_running

    def stop(self) -> None:
        if self._program.is_running:
            self.complaints.append(f"{self._program} has not ended")


def stage_of(engine: MixedEngine) -> Stage:
    """Return who carries out a plan on this engine."""
    return ProcessStage(engine) if engine.plan.engine.has_processes else ThreadStage(engine)


@contextmanager
def measuring(engine: MixedEngine) -> Iterator[None]:
    """Note, twice a second, how many times longer work takes than the processor time it needs: 1 on
    a machine that has the time, 8 where sixteen processes want two processors."""
    is_over = threading.Event()

    def measure() -> None:
        while not is_over.wait(0.5):
            began, ran = time.monotonic(), time.thread_time()
            while time.thread_time() - ran < BURST:
                pass
            engine.note("pace", f"{(time.monotonic() - began) / BURST:.2f}")

    thread = threading.Thread(target=measure)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


BURST = 0.03
"""Seconds of processor time: more than a scheduler gives to one that has slept, at once."""


def carry_out(stage: Stage) -> list[str]:
    """Carry out a plan; return what did not come to its end in time."""
    with measuring(stage.engine):
        return _carry_out(stage)


def _carry_out(stage: Stage) -> list[str]:
    engine, plan = stage.engine, stage.engine.plan
    stage.start()
    begun = engine.wait_until(
        lambda: not stage.is_enqueued and [x for x in engine.lines() if x.word == "start"],
        "The application never began",
    )
    start = float(begun[0].values[0])
    threads = []
    for move in plan.moves:
        while time.time() < start + move.at:  # timed loop: until the plan says
            stage.look_after()
            time.sleep(0.05)  # sleep: until the next look at the workers
        threads.append(threading.Thread(target=_guarded, args=[stage, move]))
        threads[-1].start()
    left = [] if _await_end(stage, threads, start + plan.seconds) else _left(engine)
    stage.stop()
    return left


def _guarded(stage: Stage, move: Move) -> None:
    try:
        stage.carry_out(move)
    except Exception as error:
        stage.complaints.append(f"{move} could not be carried out: {error!r}")
    finally:
        connections.close_all()


def _await_end(stage: Stage, threads: list[threading.Thread], last: float) -> bool:
    """Wait until all is enqueued and, twice in a row, nothing is left. Give up when for long
    nothing more has come to its end since then, however much of it there was."""
    deadline, fewest = last + END, sys.maxsize
    in_a_row = 0
    while time.time() < deadline:  # timed loop: put off by each piece of work that ends
        stage.look_after()
        time.sleep(0.2)  # sleep: until the next look
        if any(thread.is_alive() for thread in threads) or not stage.is_enqueued:
            deadline = max(deadline, time.time() + END)
            continue
        in_a_row = in_a_row + 1 if _is_settled(stage.engine) else 0
        if in_a_row == 2:
            return True
        if (count := _open_count(stage.engine)) < fewest:
            deadline, fewest = max(deadline, time.time() + END), count
    return False


def _open_count(engine: MixedEngine) -> int:
    """Return how many jobs and messages have not come to their ends."""
    try:
        return engine.jobs.filter(state__in=OPEN).count() + engine.lag()
    except (OperationalError, InterfaceError, KjoError):
        with suppress(DatabaseError):
            connections[ALIAS].close()
        return sys.maxsize


def _left(engine: MixedEngine) -> list[str]:
    """Return what has not come to its end."""
    names_of = ("handler", "state", "attempts", "available_at", "lease_token", "error", "payload")
    left = [str(row) for row in engine.jobs.filter(state__in=OPEN).values_list(*names_of)[:10]]
    left += [f"item {email}" for email in engine.items.filter(state=1).values_list("email")]
    if engine.plan.engine.transport == "database":
        rows = engine.messages.exclude(topic=names.topic("others", engine.mark))
        columns = ("topic", "value", "available_at", "lease_token", "lease_expires_at")
        return left + [str(row) for row in rows.values_list(*columns)[:10]]
    if engine.plan.engine.transport == "memory":
        return left + [str(line.values) for line in engine.lines() if line.word == "unread"]
    lag = get_transport().lag(names.consumed_topics(engine.mark), names.group(engine.mark))
    return left + [f"{place}: {count} unread" for place, count in lag.items() if count]


def _is_settled(engine: MixedEngine) -> bool:
    try:
        return engine.is_settled()
    except (OperationalError, InterfaceError, KjoError):
        with suppress(DatabaseError):
            connections[ALIAS].close()
        return False


# --- Evidence -------------------------------------------------------------------------------------

DATABASE_ERRORS = [import_path(kind) for kind in (OperationalError, InterfaceError)]
"""What a handler meets whose session is ended or whose statement is refused."""
IN_HANDLER = str(Path("tests", "mixed", "handlers.py"))
"""In the traceback of what a handler itself met, not the worker before or after it."""
OUTLIVED = re.compile(r"(?:Skipped|Deferred) ([0-9a-f-]{36})(?::\d+)?: its run outlived its lease")
"""What a worker says of a job that another one has run again meanwhile."""


def collect(stage: Stage, left: list[str]) -> invariants.Evidence:
    """Read what a run left behind, once its processes have ended."""
    engine = stage.engine
    evidence = invariants.Evidence(
        engine.plan.engine,
        {work.name: work for work in engine.plan.works},
        processor_count=len(os.sched_getaffinity(0)),
        left=left,
        workers_that_failed=stage.complaints,
    )
    evidence.entries = list(engine.entries.order_by("id").values_list("note", "job"))
    for row in engine.jobs.all():
        evidence.rows.append(
            invariants.Row(
                str(row.pk),
                trace.identity_in(row.payload),
                row.state,
                bool(row.destination),
                row.finished_at.timestamp() if row.finished_at else 0.0,
            )
        )
    for letter in engine.dead_letters.all():
        name = trace.identity_in(letter.value)
        at = letter.failed_at.timestamp()
        evidence.letters.append(invariants.Letter(str(letter.pk), name, letter.reason, at))
    failed = engine.failures.filter(error_type__in=DATABASE_ERRORS, traceback__contains=IN_HANDLER)
    ids = {str(id) for id in failed.values_list("job_id", flat=True)}
    evidence.failed = {row.name for row in evidence.rows if row.id in ids}
    outlived = _outlived(engine)
    evidence.outlived = {row.name for row in evidence.rows if row.id in outlived}
    evidence.items = dict(engine.items.values_list("email", "state"))
    _read_trace(engine, evidence)
    _read_leases(engine, evidence)
    evidence.has_dead_records = engine.plan.engine.transport != "database"
    if engine.plan.engine.transport not in ("database", "memory"):
        note_topics(engine.mark, lambda word, name, at: _note_record(evidence, word, name, at))
    elif engine.plan.engine.transport == "database":
        # Nobody has subscribed to their topic, so they are all there.
        for record in engine.messages.filter(topic=names.topic("others", engine.mark)):
            at = record.published_at.timestamp()
            evidence.records[trace.identity_in(record.value)].append(at)
    return evidence


def _outlived(engine: MixedEngine) -> set[str]:
    """Return the ids of the jobs of which a worker's log says that their runs outlived a lease."""
    return {id for program in engine.programs for id in OUTLIVED.findall(program.log)}


def _note_record(evidence: invariants.Evidence, word: str, name: str, at: float) -> None:
    (evidence.records if word == "record" else evidence.dead_records)[name].append(at)


def _read_trace(engine: MixedEngine, evidence: invariants.Evidence) -> None:
    named = {row.id: row.name for row in evidence.rows}
    named |= {letter.id: letter.name for letter in evidence.letters}
    named |= {f"item:{pk}": email for pk, email in engine.items.values_list("pk", "email")}
    begins: dict[str, list[invariants.Begin]] = defaultdict(list)
    told: dict[str, list[str]] = defaultdict(list)
    open_since: dict[str, list[float]] = defaultdict(list)
    for line in engine.lines():
        first = line.values[0] if line.values else ""
        if line.word == "begin":
            begins[first].append(invariants.Begin(line.at, line.pid))
        elif line.word == "committed":
            evidence.committed[first] = line.at
            evidence.writes.append((line.at, float(line.values[1])))
        elif line.word == "counted":
            key, counted = evidence.works[first].key, map(float, line.values[1:])
            evidence.starts[key].append(Moment(line.at, line.pid, *counted, first))
        elif line.word == "repeated":
            evidence.note_repeat(first, line.at, line.pid, float(line.values[1]))
        elif line.word == "ended":
            evidence.ends[first].append(invariants.Begin(line.at, line.pid))
        elif line.word == "frozen":
            evidence.frozen.append((int(first), line.at, float("inf")))
        elif line.word == "thawed":
            pid, since, _ = evidence.frozen.pop()
            evidence.frozen.append((pid, since, line.at))
        elif line.word == "pace":
            evidence.paces.append((line.at, float(first)))
        elif line.word == "cancel" and line.values[1] != "CANCELLED":
            # The answer decides: it had begun by then.
            evidence.works[first].end = "complete"
        elif line.word == "unsure":
            evidence.unsure.add(first)
        elif line.word == "killed":
            evidence.killed[int(first)] = line.at
        elif line.word == "disturb":
            open_since[first].append(line.at)
        elif line.word == "disturbed":
            what = first.partition("-")[0]
            evidence.disturbances.append((open_since[first].pop(0), line.at, what))
        elif line.word in ("record", "dead_record"):
            _note_record(evidence, line.word, first, float(line.values[1]))
        elif line.word in ("completed", "failed", "dead", "cancelled", "processed"):
            bare = first if first.startswith("item:") else first.partition(":")[0]
            told[named.get(bare) or trace.identity_in(first)].append(line.word)
    end = time.time()
    evidence.disturbances += [
        (since, end, what.partition("-")[0]) for what, left in open_since.items() for since in left
    ]
    evidence.begins, evidence.signals = dict(begins), dict(told)


def _read_leases(engine: MixedEngine, evidence: invariants.Evidence) -> None:
    if engine.servers.redis:
        client = redis.Redis.from_url(engine.servers.redis)
        for key in client.scan_iter(match=f"{engine.mark}:*CONS:*"):
            # -2: it ended between the two questions. -1: it never will.
            if (left := client.ttl(key)) != -2:
                evidence.leases.append(invariants.Lease(key.decode(), left >= 0))
        return
    for lease in LeaseRow.objects.using(ALIAS).filter(name__startswith="CONS:").exclude(token=""):
        evidence.leases.append(invariants.Lease(lease.name, lease.expires_at is not None))


def published_at(record: Record) -> float:
    """Return when (POSIX seconds) a record was published; 0: its transport does not say."""
    return 0.0 if record.timestamp is None else record.timestamp.timestamp()


def note_topics(mark: str, tell: Callable[[str, str, float], None]) -> None:
    """Read the topics whose records are for others, and those of dead letters, to their end.

    :param tell: is called with the kind of each record, whose it is, and when it was published.
    """
    others = names.topic("others", mark)
    counts: Counter[str] = Counter()
    subscription = get_transport().subscribe(names.topics_of_others(mark), f"reader-{mark}")
    try:
        quiet_since = time.monotonic()
        while time.monotonic() - quiet_since < 2.0 or not counts:  # timed loop: to the topics' end
            records = subscription.poll(500, 0.5)
            if time.monotonic() - quiet_since > 20:
                return
            if not records:
                continue
            quiet_since = time.monotonic()
            for record in records:
                counts[record.topic] += 1
                word = "record" if record.topic == others else "dead_record"
                tell(word, trace.identity_in(record.value), published_at(record))
            subscription.acknowledge(records)
    finally:
        subscription.close()
