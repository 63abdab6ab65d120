"""Running a schedule: its processes, each with database sessions of its own, on one thread."""

from __future__ import annotations

import contextlib
import contextvars
import io
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from django.core.management import CommandError, call_command
from django.db import connections, transaction

from kjo_django import states
from kjo_django.enqueue.storing import store_record
from kjo_django.models import Job, TransportMessage
from kjo_django.operations import dead_letters
from kjo_django.operations import jobs as operations
from kjo_django.runtime import get_transport, jobs_database
from kjo_django.transports.memory import MemoryTransport
from tests.faults.boundary import Boundary, Died, Endless, Fault, within
from tests.faults.patterns import STREAM
from tests.faults.process import Process
from tests.faults.scenarios import QUEUE, _queue_of
from tests.faults.world import OTHERS, World, _is_locked
from tests.simulation.schedule import Step, is_calm

QUEUES = (QUEUE, "faults-queue", "tasks", STREAM)
LONGEST_WAIT = 0.002
"""Seconds a statement waits for a lock: who holds it is on this thread, and waits for us."""


class Simulated(Process):
    """A process whose database sessions are its own, though others share its thread."""

    def __init__(self, name: str, queues: Sequence[str], boundary: Boundary | None = None) -> None:
        self._session = connections.create_connection(jobs_database())
        options = dict(self._session.settings_dict["OPTIONS"])
        if self._session.vendor == "sqlite":
            options["timeout"] = LONGEST_WAIT
        else:
            options["options"] = "-c lock_timeout=20"
        self._session.settings_dict = {**self._session.settings_dict, "OPTIONS": options}
        super().__init__(name, queues, boundary)

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """Let this thread use the process' database session."""
        alias = jobs_database()
        before = connections[alias]
        connections[alias] = self._session
        try:
            yield
        finally:
            connections[alias] = before

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        with self.acting(), super().unwatched():
            yield

    def ask(self, function: Callable[[], Any]) -> Any:
        with self.acting():
            return super().ask(function)

    def _step(self, step: Callable[[], bool]) -> bool:
        with self.acting():
            return super()._step(step)

    def bury(self) -> None:
        with self.acting():
            super().bury()
            connections[jobs_database()] = self._session

    def close(self) -> None:
        super().close()
        self._session.close()

    def part(self, name: str) -> None:
        """Let one of the worker's threads do one round."""
        if name == "turn":
            self.turn()
        elif name == "poll":
            for poller in self.worker.pollers:
                self._step(partial(self._poll, poller))
        else:
            self._step({"beat": self._beat, "relay": self._relay, "lanes": self._lanes}[name])


class Simulation(World):
    """The world of a schedule."""

    trace: list[str]
    """Every call of every process, by which two runs can be compared."""

    def run(self, steps: Sequence[Step]) -> list[str]:
        """Run a schedule, let everything come to its end, and return what does not hold."""
        random.seed(0)
        self.queues = QUEUES
        self.is_calm = is_calm(steps)
        self.by_number: dict[int, Simulated] = {}
        self.boundaries: list[Boundary] = []
        self.trace = []
        self.struck_count = 0
        self._thread = threading.get_ident()
        self.begin()
        try:
            self._forget(self.first)
            for step in steps:
                self.take(step)
            # Nobody's requests are refused from now on.
            self.is_mended = True
            if not self.processes:
                self._start(-1)
            self.recover()
            return self.problems()
        except Endless as error:
            return [str(error)]
        finally:
            self.trace = [call for boundary in self.boundaries for call in boundary.calls]
            self.end()

    def process(self, name: str, boundary: Boundary | None = None) -> Simulated:
        made = Simulated(name, self.queues, boundary)
        self.boundaries.append(made.boundary)
        self.processes.append(made)
        return made

    # --- Steps ------------------------------------------------------------------------------------

    def take(self, step: Step) -> None:
        """Take one step."""
        if step.action == "time":
            self.clock.advance(step.seconds)
            return
        if step.action == "start":
            self._start(step.who)
            return
        process = self.by_number.get(step.who)
        if process is None or process.boundary.is_open is False:
            return
        if step.action == "die":
            self._bury(process)
            return
        boundary = process.boundary
        if step.fault:
            boundary.fault, boundary.at = Fault(step.fault), len(boundary.calls) + step.at
            boundary._elapse = partial(self._meanwhile, step.meanwhile)
        try:
            self._act(process, step)
        except Died:
            self._bury(process)
        finally:
            self.struck_count += bool(boundary.struck)
            boundary.fault, boundary.at, boundary.struck = None, -1, ""

    def _act(self, process: Simulated, step: Step) -> None:
        if step.action == "stop":
            self._forget(process)
            process.stop()
            self.processes.remove(process)
        elif step.action == "enqueue":
            self._enqueue(process, *step.what)
        elif step.action == "others":
            self._tell_others(process, *step.what)
        elif step.action == "produce":
            process.ask(_produce_once)
        elif step.action == "cancel":
            process.ask(
                lambda: operations.cancel(Job.objects.filter(queue=QUEUE).order_by("id")[:1])
            )
        elif step.action == "replay":
            process.ask(
                lambda: dead_letters.replay(dead_letters.DeadLetterFilter(), actor="somebody")
            )
        else:
            process.part(step.action)

    def _enqueue(self, process: Simulated, *jobs: str) -> None:
        for kind, name, ending in zip(jobs[::3], jobs[1::3], jobs[2::3], strict=True):
            self._topic = _queue_of(kind)
            if kind == "stream":
                send = partial(self.patterns.tasks.send_task, {"job": name, "ending": ending})
                self.enqueue(process, name, send, many=True)
            else:
                self.kinds.enqueue(process, kind, name, ending)

    def enqueue(
        self,
        process: Process,
        name: str,
        enqueue: Callable[[], Any],
        key: str = "",
        many: bool = False,
    ) -> Any:
        key = f"{key} of {self._topic}" if key else ""  # order is a matter of one topic
        return super().enqueue(process, name, enqueue, key, many)

    def _tell_others(self, process: Simulated, name: str) -> None:
        def store() -> bool:
            with transaction.atomic():
                store_record(OTHERS, value=name.encode(), key=b"k", headers={}, kind="record")
            return True

        if process.ask(store):
            self.told_others.append(name)

    def _meanwhile(self, step: Step | None, seconds: float) -> None:
        """Let time pass, and another process take its step, in the midst of somebody's call."""
        self.clock.advance(seconds)
        if step is None or threading.get_ident() != self._thread:
            return
        self.was_locked |= _is_locked()
        self.clock.is_within_a_call, self.clock.rivals_waits = True, 0
        try:
            contextvars.Context().run(self._nested, step)
        finally:
            self.clock.is_within_a_call = False

    def _nested(self, step: Step) -> None:
        process = self.by_number.get(step.who)
        if process is None or process.boundary.fault is not None:
            return  # it is the one whose call takes so long
        with within(None):
            self.take(step)

    def _start(self, number: int) -> None:
        if number not in self.by_number:
            self.by_number[number] = self.process(f"process-{number}-{len(self.boundaries)}")

    def _forget(self, process: Process) -> None:
        for number, each in list(self.by_number.items()):
            if each is process:
                del self.by_number[number]
        if process is self.first:
            self.processes.remove(process)
            process.close()

    def _bury(self, process: Simulated) -> None:
        self._forget(process)
        self.processes.remove(process)
        process.bury()
        self.exempt |= {str(job.pk) for job in Job.objects.filter(state__in=states.FINAL)}

    # --- What must hold ---------------------------------------------------------------------------

    def _problems_of_others(self) -> list[str]:
        transport = get_transport()
        if isinstance(transport, MemoryTransport):
            values = [bytes(record.value or b"") for record in transport.records(OTHERS)]
        else:
            values = [bytes(row.value) for row in TransportMessage.objects.filter(topic=OTHERS)]
        found = [f"{n} was not told others" for n in self.told_others if n.encode() not in values]
        if self.is_calm and not self.was_locked:
            found += [f"{v!r} went out {n} times" for v, n in Counter(values).items() if n > 1]
        return found


def _produce_once() -> None:
    with contextlib.suppress(CommandError):  # it says what it could not do
        call_command("kjo_produce", "--once", verbosity=0, stdout=io.StringIO())
