"""Where scenarios happen: a database, a transport, processes, and what must hold in the end."""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import functools
import io
import random
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any

import psycopg
from django.core.management import CommandError, call_command
from django.db import connections, transaction
from django.utils import timezone

from kjo_django import signals, states
from kjo_django.conf import get_settings
from kjo_django.enqueue.storing import store_record
from kjo_django.models import (
    DeadLetter,
    DeadLetterState,
    Job,
    JobFailure,
    ProcessedEvent,
    Schedule,
    TransportMessage,
    Workflow,
    source_of_job,
)
from kjo_django.runtime import close_backends, get_coordination, get_transport
from kjo_django.states import OPEN_WORKFLOWS, ItemState, JobState, WorkflowState
from kjo_django.transports.base import OutgoingRecord
from kjo_django.transports.memory import MemoryTransport
from tests.faults.boundary import Boundary, Died, Fault, within
from tests.faults.clock import RIVAL, Clock
from tests.faults.process import Process
from tests.items.models import Item
from tests.ledger.models import Entry

ROUNDS = (1, 2, 2, 5, 5, 10, 20, 35, 35, 60, 60, 60, 60, 300, 300, 300)
"""Seconds between the rounds in which everything must have come to its end."""
ENDS = {
    JobState.COMPLETED: "job_completed",
    JobState.FAILED: "job_failed",
    JobState.CANCELLED: "job_cancelled",
}
WORKFLOW_ENDS = {
    WorkflowState.COMPLETED: "workflow_completed",
    WorkflowState.FAILED: "workflow_failed",
    WorkflowState.CANCELLED: "workflow_failed",
}
RIVAL_TIMEOUT = 30.0
RIVALS_CALLS = 40
"""Calls of a rival's turn, about: after one of them it dies where it is to."""
OTHERS = "faults-others"
"""A topic nobody here consumes."""
REPLAYED = DeadLetterState.REPLAYED
FACTS = (
    "promised",
    "withdrawn",
    "many",
    "children",
    "keys",
    "calls",
    "announced",
    "disturbances",
    "unsent",
    "told_others",
    "is_mended",
)
"""What a world notes while a process acts."""


class World:
    """:param empty: gives every case an empty database."""

    def __init__(self, clock: Clock, empty: Callable[[], None]) -> None:
        self.clock = clock
        self._empty = empty
        self.queues: Sequence[str] = ()
        self.ticks = False
        """Whether workers store the jobs of schedules."""
        self.kinds: Any = None
        self.patterns: Any = None
        self.flows: Any = None
        self.struck = ""
        self.recorded: list[str] = []
        self.marks: dict[int, Any] = {}
        """What a death after each call would leave behind, if that was asked for; see ``mark``."""
        self._rival = Rival()
        self.forget()

    def forget(self) -> None:
        self.promised: list[str] = []
        """What callers were told is committed: each must have one effect, or an end that says why
        not."""
        self.withdrawn: set[str] = set()
        """What was rolled back, or failed and is not replayed: must have none."""
        self.many: set[str] = set()
        """What may take effect more than once: handlers outside a transaction."""
        self.children: dict[str, list[str]] = {}
        """What a handler enqueues, by the name of its job: has an effect if the job has one."""
        self.keys: dict[str, list[str]] = {}
        """Names by key, in the order they were enqueued."""
        self.calls: Counter[str] = Counter()
        """How often each handler was called, committed or not."""
        self.announced: Counter[tuple[str, str]] = Counter()
        self.exempt: set[str] = set()
        """Jobs and workflows that had ended when the process died that may have ended them."""
        self.processes: list[Process] = []
        self.disturbances: list[str] = []
        """What went wrong with the rival."""
        self.was_locked = False
        """Whether the struck call held SQLite's write lock. The rival, which has no patience here,
        was refused its lease as if coordination was away; in truth it would have waited."""
        self.unsent: list[str] = []
        """What the stream's producer was told could not be stored."""
        self.told_others: list[str] = []
        """Records for others whose transaction was committed."""
        self.is_mended = False
        """Whether handlers that fail until something is mended complete."""
        self.may_discard = False
        self.never = ""
        """A text that the error of no attempt may contain."""
        self.on_stop: Callable[[], None] = lambda: None
        self.relays_once = False
        """Whether the rival is a relay that publishes what is due and ends."""
        self.has_refused = False
        """Whether a request that the database obeyed was answered with an error."""
        self.recovering: Callable[[], object] = lambda: None
        """What is done again and again beside the workers."""
        self.output = io.StringIO()

    def begin(self, fault: Fault | None = None, at: int = -1) -> Process:
        """Return the process of a new, empty world.

        :param at: number of its call that the fault strikes.
        """
        self.forget()
        self.begin_empty()
        random.seed(0)  # a case's calls must be the same ones next time
        self.first = self.process("first", Boundary(fault, at, self._elapse))
        self.first.is_strict = fault is None
        return self.first

    def begin_empty(self) -> None:
        """Empty database and transport."""
        close_backends()
        self._empty()
        self.clock.advances = 0

    def process(self, name: str, boundary: Boundary | None = None) -> Process:
        self.processes.append(Process(name, self.queues, boundary, ticks=self.ticks))
        return self.processes[-1]

    def end(self) -> None:
        for process in self.processes:
            process.close()
        self.processes.clear()

    def _elapse(self, seconds: float) -> None:
        """Let others act while a call is under way; on a thread of their own, and with little
        patience for locks that it holds."""
        self.clock.advance(seconds)
        self.was_locked = _is_locked()
        errors: list[BaseException] = []

        def act() -> None:
            try:
                _be_impatient()
                if self.relays_once:
                    with contextlib.suppress(CommandError):  # it says what it could not do
                        call_command("kjo_produce", "--once", verbosity=0, stdout=io.StringIO())
                else:
                    rival = self.process("rival", self._boundary_of_rival())
                    rival.boundary.on_thread = _join_the_rival
                    rival.turn()
            except Died:
                rival.bury()
            except BaseException as error:
                errors.append(error)

        with within(None):
            self.clock.rivals_waits = 0
            has_ended = self._rival.act(act)
        # Told at the end: raised here, it would be an error of the struck call.
        if not has_ended:
            self.disturbances.append("the rival waits for what the struck call holds")
        self.disturbances += [f"the rival failed: {error!r}" for error in errors]

    def _boundary_of_rival(self) -> Boundary:
        struck = self.first.boundary
        if struck.fault is not Fault.RIVAL_DIES:
            return Boundary()
        return Boundary(Fault.DIES_AFTER, random.Random(struck.at).randrange(RIVALS_CALLS))

    def close(self) -> None:
        """End the rival's thread."""
        self._rival.close()

    def mark(self, commits: Callable[[], Any]) -> Any:
        """Return what stands for all that another process would find if this one died now. The same
        value twice: nothing has changed between that outlives it.

        :param commits: returns another value once anything was committed.
        """
        facts = tuple(repr(getattr(self, name)) for name in FACTS)
        return commits(), self.first.boundary.contract_calls, self.clock.offset, facts

    def same_deaths(self) -> dict[int, int]:
        """Return the calls after which a death leaves behind what it does after an earlier call,
        and which that is: most are statements of a transaction that dies with the process, and
        reads."""
        same, firsts = {}, {}
        for at, mark in self.marks.items():
            if (first := firsts.setdefault(mark, at)) != at:
                same[at] = first
        return same

    # --- Recovering -------------------------------------------------------------------------------

    def recover(self) -> None:
        """Let who is alive, and a fresh worker for who is dead, bring everything to its end."""
        for process in list(self.processes):
            process.boundary.is_open = False
            if process.is_stopped:
                self.processes.remove(process)
                self.process("fresh")
            elif process.boundary.is_dead:
                process.bury()
                self.processes.remove(process)
                self.excuse()
                self.clock.advance(41)
                self.process("fresh")
        for seconds in ROUNDS:
            self.recovering()
            for number in range(3):
                # Each has its turn, and gives one sign of life at each moment.
                done = [process.turn(beats=not number) for process in self.processes]
                if not any(done):
                    break
            if self.is_done():
                break
            self.clock.advance(seconds)
        # Whoever is alive renews what it holds: what nobody needs any more would be held for ever.
        for _ in range(3):
            if not self.leases():
                break
            self.clock.advance(20)
            for process in self.processes:
                process._step(process._beat)

    def excuse(self) -> None:
        """Note what has ended when a process dies: it need not have announced what it had committed
        just then, as the reference of signals says."""
        ended = [
            *Job.objects.filter(state__in=states.FINAL),
            *Workflow.objects.exclude(state__in=OPEN_WORKFLOWS),
        ]
        self.exempt |= {str(row.pk) for row in ended}

    def is_done(self) -> bool:
        return (
            not Job.objects.unfinished().exists()
            and not (self.ticks and due_schedules())
            and not Item.objects.filter(state=ItemState.PENDING).exists()
            and not self.lag()
            and not self.is_delayed()
            and all(process.is_idle for process in self.processes)
        )

    def lag(self) -> dict[str, int]:
        lags: dict[str, int] = {}
        for name in self.queues:
            queue = get_settings().queue(name)
            counts = get_transport(queue.transport).lag([queue.topic], queue.consumer_group)
            if any(counts.values()):
                lags[name] = sum(counts.values())
        return lags

    def leases(self) -> list[str]:
        """Return the names of the jobs that somebody holds."""
        return list(get_coordination().names("CONS:"))

    def is_delayed(self) -> bool:
        """Return whether the transport keeps a message until its time, which no lag tells of."""
        queues = [get_settings().queue(name) for name in self.queues]
        rows = TransportMessage.objects.filter(
            topic__in=[queue.topic for queue in queues], available_at__gt=timezone.now()
        )
        transports = [get_transport(queue.transport) for queue in queues]
        memories = [each for each in transports if isinstance(each, MemoryTransport)]
        return rows.exists() or any(each.delayed for each in memories)

    # --- What must hold ---------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """Return what does not hold."""
        found = list(self.disturbances)
        jobs = list(Job.objects.order_by("id"))
        happened = list(Entry.objects.order_by("id").values_list("job", flat=True))
        effects = Counter(happened)
        letters = list(DeadLetter.objects.select_related("job"))
        marks = Counter(ProcessedEvent.objects.values_list("event_id", flat=True))
        if lags := self.lag():
            found.append(f"not acknowledged: {lags}")
        if leases := self.leases():
            found.append(f"leases are held for ever: {leases}")
        found += [f"outstanding in {p.name}" for p in self.processes if not p.is_idle]
        found += [f"the schedule {name} is still due" for name in due_schedules()]
        for job in jobs:
            found += self._problems_of(job, effects, letters, marks[job.message_id])
        for name in self.promised:
            own = [letter for letter in letters if _names(letter, name)]
            ended = bool(effects[name]) or any(
                _name_of(job) == name and job.state == JobState.CANCELLED for job in jobs
            )
            if not ended and not own:
                found.append(f"{name} was promised, and has no effect and no trace")
            elif not ended and all(letter.state == REPLAYED for letter in own):
                found.append(f"{name} has no effect, though its dead letter was replayed")
        for name, count in effects.items():
            if name in self.withdrawn:
                found.append(f"{name} was not to run, and has {count} effects")
            if count > 1 and name not in self.many:
                found.append(f"{name} has {count} effects")
        for name, children in self.children.items():
            found += [
                f"{name} has {effects[name]} effects, and {child} has {effects[child]}"
                for child in children
                if effects[child] != effects[name]
            ]
        found += self._disorder(jobs, happened) + self._problems_of_others()
        if self.never:
            failures = JobFailure.objects.filter(error__contains=self.never)
            found += [
                f"An attempt of {failure.job_id} failed: {self.never}" for failure in failures
            ]
            dead = DeadLetter.objects.filter(error__contains=self.never)
            found += [f"{bytes(letter.value)!r} is dead: {self.never}" for letter in dead]
        for row in Workflow.objects.exclude(state__in=OPEN_WORKFLOWS):
            signal = WORKFLOW_ENDS[WorkflowState(row.state)]
            is_excused = str(row.pk) in self.exempt or self.has_refused
            if not is_excused and not self.announced[signal, str(row.pk)]:
                found.append(f"workflow {row.name} ({row.state}) was not announced by {signal}")
        return found + self.flows.problems()

    def _problems_of_others(self) -> list[str]:
        """Look at the records that only others read."""
        transport = get_transport()
        if isinstance(transport, MemoryTransport):
            values = [bytes(record.value or b"") for record in transport.records(OTHERS)]
        else:
            values = [bytes(row.value) for row in TransportMessage.objects.filter(topic=OTHERS)]
        found = [f"{n} was not told others" for n in self.told_others if n.encode() not in values]
        if self._goes_out_once():
            found += [f"{v!r} went out {n} times" for v, n in Counter(values).items() if n > 1]
        return found

    def _goes_out_once(self) -> bool:
        """Return whether there was no outage, crash or lease that ran out, so that records for
        others go out once."""
        fault = self.first.boundary.fault
        return (fault is Fault.OVERLAPS and not self.was_locked) or fault is None

    def _problems_of(
        self, job: Job, effects: Counter[str], letters: Sequence[DeadLetter], marks: int
    ) -> list[str]:
        found: list[str] = []
        name, id = _name_of(job), str(job.pk)
        who = f"{name or job.handler} ({job.state})"
        if job.state not in ENDS:
            return [f"{who} reaches no end: attempts {job.attempts}, {job.error!r}"]
        if job.destination:
            return found
        # That of an earlier generation stays open until it is replayed.
        earlier = {source_of_job(job.pk, number) for number in range(1, job.generation)}
        letters = [x for x in letters if x.source_id not in earlier]
        open_ones = [x for x in letters if x.job_id == job.pk and x.state == DeadLetterState.OPEN]
        is_completed = job.state == JobState.COMPLETED
        if self.may_discard:
            open_ones = [x for x in letters if x.job_id == job.pk and x.state != REPLAYED]
        if len(open_ones) != (job.state == JobState.FAILED):
            found.append(f"{who} has {len(open_ones)} open dead letters")
        if marks != is_completed:
            found.append(f"{who} has {marks} markers")
        if name and name not in self.many and effects[name] != is_completed:
            found.append(f"{who} has {effects[name]} effects")
        if name and is_completed and not effects[name]:
            found.append(f"{who} has no effect")
        announcement = ENDS[JobState(job.state)]
        if job.state == JobState.CANCELLED and self.has_refused:
            return found  # who asked for it was told of an error, and nobody else was
        # A message nobody enqueued here ends under its own id where another copy of it has run.
        is_announced = (
            self.announced[announcement, id] or self.announced[announcement, job.message_id]
        )
        if id not in self.exempt and not is_announced:
            found.append(f"{who} was not announced by {announcement}")
        return found

    def _disorder(self, jobs: Sequence[Job], happened: Sequence[str]) -> list[str]:
        """Compare the order of effects with that of enqueuing, but for those that lost their place
        by failing."""
        if not self.keys:
            return []
        names_of = {job.pk: _name_of(job) for job in jobs}
        failed = {names_of.get(id) for id in JobFailure.objects.values_list("job", flat=True)}
        done = [_name_of(job) for job in jobs if job.state == JobState.COMPLETED]
        wanted = [n for n in done if n not in failed and n not in self.many]
        found = []
        for key, names in self.keys.items():
            expected = [name for name in names if name in wanted]
            order = [name for name in happened if name in expected]
            if not self._is_in_order(order, expected):
                found.append(f"key {key} ran in the order {order}, not {expected}")
        return found

    def _is_in_order(self, order: Sequence[str], expected: Sequence[str]) -> bool:
        """Return whether jobs of one key took effect in an order that is kept."""
        return order == expected

    # --- Means of scenarios -----------------------------------------------------------------------

    def hear(self, signal: str, /, **facts: Any) -> None:
        from tests.faults.boundary import current

        boundary = current()
        if boundary is None or not boundary.is_dead:
            self.announced[signal, str(facts.get("job_id") or facts["workflow_id"])] += 1

    def listening(self) -> Callable[[], None]:
        """Hear the signals of ends until what is returned is called."""
        receivers = []
        for name in (*ENDS.values(), *WORKFLOW_ENDS.values()):

            def receive(sender: Any, signal: Any, *, heard: str = name, **facts: Any) -> None:
                self.hear(heard, **facts)

            getattr(signals, name).connect(receive, weak=False)
            receivers.append((getattr(signals, name), receive))

        def stop() -> None:
            for signal, receive in receivers:
                signal.disconnect(receive)

        return stop

    def enqueue(
        self,
        process: Process,
        name: str,
        enqueue: Callable[[], Any],
        key: str = "",
        many: bool = False,
    ) -> Any:
        """Do what a request does that commits a job of this name."""
        if many:
            self.many.add(name)
        if key:
            self.keys.setdefault(key, []).append(name)

        def commit() -> Any:
            with transaction.atomic():
                return enqueue() or True

        answer = process.ask(commit)
        if answer is not None and name not in self.unsent and getattr(answer, "is_new", True):
            self.promised.append(name)
        return answer

    def tell_others(self, process: Process, name: str) -> None:
        """Store a record that only others read."""

        def store() -> bool:
            with transaction.atomic():
                store_record(OTHERS, value=name.encode(), key=b"k", headers={}, kind="record")
            return True

        if process.ask(store) is not None:
            self.told_others.append(name)

    def publish(self, queue: str, value: bytes, key: bytes | None = None, **headers: bytes) -> None:
        """Put a record on a queue's topic, as another service would."""
        conf = get_settings().queue(queue)
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        record = OutgoingRecord(conf.topic, value, key, named)
        with within(None):
            (answer,) = get_transport(conf.transport).publish([record])
        assert answer.error is None


def due_schedules() -> list[str]:
    """Return the names of the schedules that somebody should have looked at."""
    due = Schedule.objects.filter(is_enabled=True, is_paused=False, next_at__lte=timezone.now())
    return list(due.values_list("name", flat=True))


class Rival:
    """The thread that acts while another one's call is under way. It stays for the next case, and
    on PostgreSQL its session does."""

    def __init__(self) -> None:
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None

    def act(self, does: Callable[[], None]) -> bool:
        """Return whether it has ended; what has not is left alone."""

        def act() -> None:
            try:
                contextvars.Context().run(does)
            finally:
                connection = connections["default"]
                if connection.vendor == "sqlite" or connection.in_atomic_block:
                    connections.close_all()

        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, initializer=_be_the_rival)
        acting = self._thread.submit(act)
        if acting in concurrent.futures.wait([acting], RIVAL_TIMEOUT).done:
            acting.result()
            return True
        self._thread.shutdown(wait=False)
        self._thread = None
        return False

    def close(self) -> None:
        if self._thread is not None:
            self._thread.submit(connections.close_all)
            self._thread.shutdown()
            self._thread = None


def _be_the_rival() -> None:
    threading.current_thread().name = RIVAL


def _join_the_rival() -> None:
    """Let the recorder of the rival be as impatient as the rival: its lane waits for coroutines,
    whose ends the recorder may be unable to record until the struck call has ended."""
    if threading.current_thread().name == "kjo-recorder":
        _be_the_rival()
        _be_impatient()


@contextlib.contextmanager
def _commits() -> Iterator[Callable[[], Any]]:
    """Yield what returns another value once anything was committed."""
    connection = connections["default"]
    if connection.vendor == "sqlite":
        name = connection.settings_dict["NAME"]
        with contextlib.closing(sqlite3.connect(name, check_same_thread=False)) as session:
            yield lambda: session.execute("PRAGMA data_version").fetchone()
    else:
        parameters = connection.get_connection_params()
        wanted = {name: parameters[name] for name in ("host", "port", "user", "dbname")}
        with psycopg.connect(**wanted, autocommit=True) as session:
            yield lambda: session.execute("SELECT pg_current_snapshot()::text").fetchone()


def _is_locked() -> bool:
    """Return whether somebody holds SQLite's write lock."""
    connection = connections["default"]
    if connection.vendor != "sqlite":
        return False
    with contextlib.closing(sqlite3.connect(connection.settings_dict["NAME"], timeout=0)) as asks:
        try:
            asks.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return True
        return False


def _be_impatient() -> None:
    """Let this thread's statements fail soon where others hold what they need."""
    connection = connections["default"]
    options = dict(connection.settings_dict["OPTIONS"])
    if connection.vendor == "sqlite":
        options["timeout"] = 0.005
    else:
        options["options"] = "-c lock_timeout=20"
    connection.settings_dict = {**connection.settings_dict, "OPTIONS": options}


def _name_of(job: Job) -> str:
    """Return what the effect of a job is called, empty for a job without one."""
    if job.destination or job.handler.startswith("kjo_django."):
        return ""
    arguments = job.arguments
    if job.handler == "faults.tick":
        tick = datetime.fromisoformat((job.headers or {})["kjo-scheduled-for"])
        return f"{arguments.get('prefix', 'tick')}-{tick:%H:%M:%S}"
    for part in ("kwargs", "data"):
        if isinstance(arguments, dict) and isinstance(arguments.get(part), dict):
            arguments = arguments[part]
    if isinstance(arguments, dict) and "job" in arguments:
        return str(arguments["job"])
    return job.unique_id or "" if job.queue == "faults-queue" else ""


def _names(letter: DeadLetter, name: str) -> bool:
    if letter.job is not None and _name_of(letter.job) == name:
        return True
    return letter.value is not None and name.encode() in bytes(letter.value)


def run(
    world: World,
    act: Callable[[World, Process], None],
    fault: Fault | None,
    at: int,
    *,
    marks: bool = False,
) -> list[str]:
    """Run a scenario with one fault, recover, and return the problems; the first is what was
    struck. Empty: it holds.

    :param marks: also note after each call what a death would leave behind.
    """
    process = world.begin(fault, at)
    try:
        with _commits() if marks else contextlib.nullcontext() as commits:
            if commits is not None:
                process.boundary.mark = functools.partial(world.mark, commits)
            try:
                act(world, process)
            except Died:
                assert fault is Fault.DIES_AFTER
            process.boundary.mark = None
        world.has_refused = bool(process.refusals)
        world.recover()
        return world.problems()
    finally:
        world.struck, world.recorded = process.boundary.struck, process.boundary.calls
        world.marks = process.boundary.marks
        world.end()
