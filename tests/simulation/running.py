"""Running a schedule: processes whose threads are fibers, in virtual time."""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import count
from math import inf
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core.management import CommandError, call_command
from django.db import connections, transaction
from django.test import override_settings
from django.utils import timezone

from kjo_django import Workflow, chain, group, registry, states
from kjo_django.engine.attempt import Delivery
from kjo_django.engine.runners.loop import LoopRunner
from kjo_django.models import DeadLetter, Job, Schedule
from kjo_django.models import Workflow as WorkflowRow
from kjo_django.operations import dead_letters, workflows
from kjo_django.operations import jobs as operations
from kjo_django.transports.database.transport import forget_groups
from kjo_django.worker.lanes import Lanes
from tests.databases import led_to, sqlite_settings
from tests.faults.boundary import MOST_CALLS, Boundary, Died, Endless, current, within
from tests.faults.building import TASKS, built, kjo
from tests.faults.clock import Clock
from tests.faults.patterns import STREAM
from tests.faults.process import Process
from tests.faults.scenarios import LEVELS, OUTSIDE, QUEUE, _queue_of
from tests.faults.schedules import declare, name_of, ticks_of
from tests.faults.world import ROUNDS, World, _name_of
from tests.ledger.models import Entry
from tests.simulation import fibers
from tests.simulation.fibers import CallFault, Fiber, current_fiber
from tests.simulation.limited import LIMITS, Limited, limit_of
from tests.simulation.schedule import FLOWING, LIMITING, THREADS, TICKING, Step

QUEUES = (QUEUE, LEVELS, "faults-queue", "tasks", STREAM)
LEASE_LASTS = 10.0
"""Seconds for which whoever has given a sign of life and renewed its leases keeps them."""
MOST_ROUNDS = 3000
"""Turns of all processes after which everything must have come to its end."""
FROZEN = 3.0
"""Seconds after which a process that pauses in the midst of a step cannot renew its leases."""
PREFIX = "simulation."
"""How the names of handlers with limits begin."""
SOON = 5.0
"""Seconds for which nothing is done but to wait for the next job with a limit."""


class SimulatedBoundary(Boundary):
    """What crosses it on a fiber meets the fiber's faults; on any other thread, nothing."""

    def __init__(self, touched: set[str]) -> None:
        super().__init__()
        self._touched = touched
        self.steppers: list[Any] = []
        """Loops of its worker whose threads are not started: the schedule takes their steps."""
        self.loops: list[LoopRunner] = []
        """Of which the schedule runs the coroutines."""
        self.replacements: list[Callable[[], object]] = []
        """What lanes do first that take the places of threads that were given up."""

    def uses(self, connection: Any, cursor: Any = None) -> Any:
        if current_fiber() is None:
            return contextlib.nullcontext()
        return super().uses(connection, cursor)

    def cross(
        self, name: str, effect: Callable[[], Any], fail: Callable[[bool], Any] | None = None
    ) -> Any:
        if self.is_dead:
            raise Died
        self.call_count += 1
        if self.call_count > MOST_CALLS:
            raise Endless(f"it goes on for ever, with {name}")
        if name.startswith("INSERT "):
            self._touched.add(name[7:])
        fiber = current_fiber()
        if fiber is None or name == "connect":  # whose thread was another process's has connected
            return effect()
        return fiber.cross(name, effect, fail)


class Simulated(Process):
    """A process whose worker's threads are fibers.

    :param fiber: returns a fiber for a thread of this name.
    :param on_renewed: called whenever it has renewed what it holds.
    :param on_round: called before each round of one of its threads.
    :param on_lost: called with the leases that it has lost and not given back.
    """

    def __init__(
        self,
        name: str,
        boundary: SimulatedBoundary,
        fiber: Callable[[str], Fiber],
        clock: Clock,
        on_renewed: Callable[[float], None],
        on_round: Callable[[], None],
        on_lost: Callable[[Sequence[str]], None],
    ) -> None:
        self.simulated = boundary
        self._clock = clock
        self._on_renewed = on_renewed
        self._on_round = on_round
        super().__init__(name, QUEUES, boundary, lanes=2, ticks=True)
        self._fiber = fiber
        self.fibers: dict[str, Fiber] = {}
        self._had_at: dict[str, float] = {}
        """When coordination last surely had each lease of this process, which keeps it unless it
        gives it back."""
        self._on_lost = on_lost
        self._watch_leases(self.worker.leases)
        for each in registry.handlers():
            # As if each had run before: nobody knows how long an unknown one takes, and it runs
            # alone.
            self.worker.scheduler.measure(each.name, 0.001)

    def fiber(self, thread: str) -> Fiber:
        """Return the fiber of a thread."""
        if thread not in self.fibers:
            fiber = self.fibers[thread] = self._fiber(f"{self.name} {thread}")
            fiber.boundary = self.boundary
        return self.fibers[thread]

    @property
    def busy(self) -> list[Fiber]:
        return [fiber for fiber in self.fibers.values() if fiber.is_busy]

    def part(self, name: str) -> bool:
        """Let one of the worker's threads do one round; return whether anything was done."""
        steps: dict[str, Callable[[], bool]] = {
            "beat": self._beat,
            "relay": self._relay,
            "poll": self._poll_all,
            "lane": self._run_lane,
            "loop": self._run_coroutine,
            "record": self._record,
            "line": self._advance_lines,
            "tick": self._tick,
        }
        self._on_round()
        return self._step(steps[name.removesuffix("-2")])

    def hang(self, lane: str) -> Fiber | None:
        """Let the handler that a lane has begun hang, for so long that its thread is given up;
        return that thread, which may go on. None: the lane is in no handler."""
        fiber, other, watch = self.fiber(lane), self.fiber(f"hung-{lane}"), self.worker._watch
        calls = [call for call in watch.calls if call.thread_id == fiber.thread_id]
        if not calls or other.is_busy:
            return None
        # It hangs after the call at which it has paused.
        self.simulated.end_statements(fiber.thread_id)
        for call in calls:
            call.is_over = True
            with within(self.boundary):
                watch._act_on(call)
        if not self.simulated.replacements:
            return None
        fiber.lose_connection()
        self.fibers |= {lane: other, f"hung-{lane}": fiber}
        fiber.name, other.name = other.name, fiber.name
        return fiber

    def turn(self, *, beats: bool = True) -> bool:
        done = [self.part("beat")] if beats else []
        done += [self.part("tick")] if Schedule.objects.exists() else []
        done += [self.part(name) for name in ("relay", "poll")]
        for name in ("lane", "loop", "record"):
            while self.part(name):
                done.append(True)
        self.part("line")
        return any(done)

    def _beat(self) -> bool:
        began = time.monotonic()
        super()._beat()
        self.worker.leases.renew_rows()
        self._on_renewed(began)
        return False

    def _watch_leases(self, leases: Any) -> None:
        """Note which leases coordination surely has for this process."""
        claim, claim_slots = leases.claim, leases.claim_slots
        settle_within = leases.settle_within
        renew, show_alive = leases.renew, leases.show_alive

        def claiming(deliveries: Sequence[Delivery], ttl: timedelta | None = None) -> Any:
            answers = claim(deliveries, ttl)
            self._note_claims([each.lease for each in deliveries if not each.has_own_lease])
            return answers

        def claiming_slots(asks: Sequence[tuple[str, str, int]], ttl: timedelta) -> Any:
            answers = claim_slots(asks, ttl)
            self._note_claims([slot for lease, *_ in asks for slot in leases._slots.get(lease, ())])
            return answers

        def settling(using: str, deliveries: Sequence[Delivery]) -> Any:
            settled = settle_within(using, deliveries)
            self._forget_leases(each.lease for each in settled)
            return settled

        def renewing() -> bool:
            is_renewed: bool = renew()
            if is_renewed:
                self._look_for_lost_leases()
            return is_renewed

        def showing_alive() -> None:
            shown_at = leases._shown_at
            show_alive()
            if time.monotonic() - shown_at > LEASE_LASTS:
                self._had_at.clear()  # others may have thought it dead meanwhile

        leases.claim, leases.claim_slots = claiming, claiming_slots
        leases.settle_within = settling
        leases.renew, leases.show_alive = renewing, showing_alive

    def _mine(self, names: Sequence[str]) -> set[str]:
        """Return which of these leases this process has, as coordination says."""
        leases = self.worker.leases
        with within(None):
            owners = leases._coordination.holders(list(names)) if names else {}
        return {name for name, owner in owners.items() if owner == leases.token}

    def _note_claims(self, names: Sequence[str]) -> None:
        self._forget_leases(names)
        self._had_at.update(dict.fromkeys(self._mine(names), time.monotonic()))

    def _forget_leases(self, names: Iterable[str]) -> None:
        for name in names:
            self._had_at.pop(name, None)

    def _look_for_lost_leases(self) -> None:
        """Look for leases that this process had a moment ago and has no more, though it has given
        none of them back, and was not thought dead."""
        held, now = self.worker.leases._held, time.monotonic()
        self._forget_leases([name for name in self._had_at if name not in held])
        mine = self._mine(sorted(self._had_at))
        lost = [name for name in self._had_at if name not in mine and name in held]
        self._on_lost([name for name in lost if now - self._had_at[name] < LEASE_LASTS])
        self._forget_leases(lost)
        self._had_at.update(dict.fromkeys(mine & {*self._had_at}, now))

    def _relay(self) -> bool:
        before = self.worker._relay.published_count
        self.worker._relay.step()
        return self.worker._relay.published_count > before

    def _poll_all(self) -> bool:
        before = sum(poller.polled_count for poller in self.worker.pollers)
        for poller in self.worker.pollers:
            poller.step()
            self._check()
        return sum(poller.polled_count for poller in self.worker.pollers) > before

    def _run_lane(self) -> bool:
        try:
            if self.simulated.replacements:
                self.simulated.replacements.pop(0)()
            return self.worker.lanes.run_group(0.0)
        finally:
            self.worker._watch.forget(threading.get_ident())

    def _run_coroutine(self) -> bool:
        """Run one coroutine outside a transaction to its end."""
        for runner in self.simulated.loops:
            if runner._waiting:
                runner._freshen()
                async_to_sync(runner._run_step)(runner._waiting.popleft())
                return True
        return False

    def _record(self) -> bool:
        before = self.boundary.call_count
        self._clock.offset += 0.001  # what has ended just now is not due
        for each in self.simulated.steppers:
            each.step()
        return self.boundary.call_count > before

    def stop(self) -> None:
        """Let the coroutines that run end first."""
        self.worker.scheduler.stop()
        while self.simulated.replacements:
            self.part("lane")
        while self.part("loop") or self.part("record"):
            pass
        super().stop()

    def die(self) -> None:
        """End as SIGKILL ends it: sessions end, and nobody gives a sign of life any more."""
        self.boundary.die()
        for fiber in self.busy:
            while fiber.is_busy:
                fiber.resume()
        for fiber in self.fibers.values():
            fiber.lose_connection()
        self.crash()


class Simulation(World):
    """The world of a schedule."""

    def __init__(self, *arguments: Any) -> None:
        self.touched: set[str] = set()
        """Tables that have been written to."""
        self._idle: list[Fiber] = []
        self._fibers: list[Fiber] = []
        super().__init__(*arguments)

    def install(self, monkeypatch: Any) -> None:
        """Leave threads, waits and locks to the schedule."""
        fibers.install(monkeypatch)
        monkeypatch.setattr(LoopRunner, "_call", lambda runner: None)
        for module in ("engine.recorder", "limits.permits", "limits.releasing"):
            monkeypatch.setattr(f"kjo_django.{module}.threading", fibers.Threading())
        start, join = threading.Thread.start, threading.Thread.join

        def start_unless_stepped(thread: threading.Thread) -> None:
            boundary, target = current(), getattr(thread, "_target", None)
            owner = getattr(target, "__self__", None)
            if isinstance(boundary, SimulatedBoundary) and isinstance(owner, LoopRunner):
                boundary.loops.append(owner)
            elif isinstance(boundary, SimulatedBoundary) and isinstance(owner, Lanes):
                boundary.replacements += getattr(thread, "_args", ())
            elif isinstance(boundary, SimulatedBoundary) and hasattr(owner, "step"):
                boundary.steppers.append(owner)
            elif thread.name != "kjo-relay-leases":
                start(thread)

        def join_if_started(thread: threading.Thread, timeout: float | None = None) -> None:
            if thread.ident is not None:
                join(thread, timeout)

        monkeypatch.setattr(threading.Thread, "start", start_unless_stepped)
        monkeypatch.setattr(threading.Thread, "join", join_if_started)

    def uninstall(self) -> None:
        """End the fibers."""
        for fiber in self._fibers:
            fiber.close()

    def run(self, steps: Sequence[Step]) -> list[str]:
        """Run a schedule, let everything come to its end, and return what does not hold."""
        random.seed(0)
        self.queues = QUEUES
        self.forget()
        self.by_number: dict[int, Simulated] = {}
        self.is_calm = True
        self.has_refused = False
        self.trace: list[str] = []
        self._spans: dict[str, tuple[int, int]] = {}
        """When each request that enqueued a job began and ended."""
        self.struck_count = 0
        self.lost_leases: list[str] = []
        self.debounced: set[str] = set()
        """The names of payloads, of which a later one replaces those that have not begun."""
        self._started = 0
        self.begin_empty()
        declare()
        self.limited = Limited(self.kinds)
        self.clock.begin_day()
        try:
            for step in steps:
                self.take(step)
            self._finish()
            # Nobody's requests are refused from now on.
            self.is_mended = True
            if not self.by_number:
                self._start(0)
            self.recover()
            for change in (_replay_all, _retry_flows, _discard, _cancel_flows):
                if not self._is_held():
                    break
                # Somebody has to repeat a step, or to give it up.
                self.may_discard |= change is _discard
                change()
                self.recover()
            return self.problems()
        except Endless as error:
            return [str(error)]
        finally:
            self.end()

    def end(self) -> None:
        for process in list(self.by_number.values()):
            process.boundary.call_count = 0  # what it has to do to end is not what went on for ever
            if process.busy:
                process.die()
            self._forget(process)
        super().end()

    def problems(self) -> list[str]:
        """Look also for leases that were lost, and for payloads that ran although their job was
        given another one."""
        stored = {_name_of(job) for job in Job.objects.all()}
        ran = set(Entry.objects.filter(job__in=self.debounced).values_list("job", flat=True))
        replaced = [f"{name} ran and was replaced" for name in ran - stored]
        lost = [f"{name} was lost, though nobody gave it back" for name in self.lost_leases]
        return super().problems() + replaced + self.limited.problems() + lost

    # --- Steps ------------------------------------------------------------------------------------

    def take(self, step: Step) -> None:
        """Take one step."""
        if step.action == "time":
            self._pass(step.seconds)
        elif step.action == "mend":
            self.is_mended = True
        elif step.action == "start":
            self._start(step.who)
        elif step.who in self.by_number:
            process = self.by_number[step.who]
            if step.action == "die":
                self._bury(process)
            elif step.action == "stop":
                self._stop(process)
            elif step.action == "hang":
                self._hang(process, *step.what)
            else:
                self._act(process, step)

    def _act(self, process: Simulated, step: Step) -> None:
        threads = THREADS | LIMITING | TICKING | FLOWING
        thread = step.what[0] if step.action == "go" else threads[step.action]
        fiber = process.fiber(thread)
        if not fiber.is_busy:
            if step.action == "go":
                return
            fiber.begin(partial(self._do, process, step))
        self._resume(process, fiber, CallFault(step.fault) if step.fault else None, step)
        if fiber.is_blocked:
            # Else whoever pauses with SQLite's lock keeps everybody from everything.
            for holder, each in [(p, f) for p in self.by_number.values() for f in p.busy]:
                if each.is_busy and each.is_in_transaction and not each.is_blocked:
                    self._resume(holder, each)

    def _resume(
        self,
        process: Simulated,
        fiber: Fiber,
        fault: CallFault | None = None,
        step: Step | None = None,
    ) -> None:
        if fault is None or step is None:
            fiber.resume()
        else:
            fiber.resume(fault, step.at, step.nth)
            self.struck_count += bool(fiber.struck)
            if fiber.struck and fault not in (CallFault.PAUSES_BEFORE, CallFault.PAUSES_AFTER):
                self.is_calm = False
        if process.boundary.is_dead:
            self._bury(process)

    def _do(self, process: Simulated, step: Step) -> None:
        """Take a step on the fiber of its thread."""
        action, what = step.action, step.what
        if action == "enqueue":
            for kind, name, ending in zip(what[::3], what[1::3], what[2::3], strict=True):
                self._enqueue(process, kind, name, ending)
        elif action == "withdraw":
            self._withdraw(process, *what[:3])
        elif action == "others":
            self.tell_others(process, *what)
        elif action == "produce":
            process.ask(_produce_once)
        elif action == "schedule":
            self._schedule(process, *what)
        elif action == "flow":
            self._enqueue_flow(process, *what)
        elif action in _CHANGES:
            self.may_discard |= action == "discard"
            answer = process.ask(lambda: (_CHANGES[action](*what), True))
            self.has_refused |= answer is None and action in ("cancel-step", "cancel-flow")
        elif action == "cancel":
            first = Job.objects.filter(queue=QUEUE).order_by("id")[:1]
            self.has_refused |= process.ask(lambda: (operations.cancel(first), True)) is None
        elif action == "replay":
            process.ask(partial(_replay, *what))
        else:
            process.part(action)

    def _enqueue(self, process: Simulated, kind: str, name: str, ending: str) -> None:
        topic = _queue_of(kind)
        if kind == "stream":
            send: Any = partial(self.patterns.tasks.send_task, {"job": name, "ending": ending})
            self.enqueue(process, name, send, many=True)
        elif kind == "unique":
            payload = {"job": name, "ending": ending}
            put = partial(self.kinds.queue.enqueue, name.partition("-")[0], payload, result_ttl=500)
            self.enqueue(process, name, put)
        elif kind == "debounced":
            # Not promised: another request may replace it before this one's answer is read.
            process.ask(partial(self.patterns.again.enqueue, job=name))
            self.debounced.add(name)
        elif kind in LIMITS:
            # Others of the key that do not wait for the same limit overtake those that do.
            key = f"k of {limit_of(kind, name)}" if name.startswith("k") else ""
            put = partial(self.limited.jobs[kind].enqueue, job=name, ending=ending)
            is_outside = not LIMITS[kind].get("atomic", True)
            self.enqueue(process, name, put, key, is_outside)
        else:
            key = f"k of {topic}" if name.startswith("k") else ""  # order is a matter of one topic
            put = self.kinds.enqueuing(kind, name, ending)
            self.enqueue(process, name, put, key, kind in OUTSIDE)

    def _schedule(self, process: Simulated, name: str) -> None:
        """Add a schedule of three ticks, each of which has one job."""
        now = timezone.now()
        times = {"every": 2, "starts_at": now, "ends_at": now + timedelta(seconds=6)}
        row = Schedule(
            name=name, job="faults.tick", payload={"prefix": name}, catch_up="all", **times
        )
        row.next_at = row.timetable.next_after(now)
        if process.ask(lambda: (row.save(force_insert=True), True)) is not None:
            self.promised += [name_of(name, tick) for tick in ticks_of(row)]

    def _enqueue_flow(
        self, process: Simulated, name: str, shape: str, policy: str, *texts: str
    ) -> None:
        """Enqueue a workflow as ``schedule`` draws it."""
        names = [f"{name}.{number}" for number in range(len(texts))]
        parts = [text.split() for text in texts]
        drawn = zip(names, parts, strict=True)
        steps = [self.flows.step(kind, each, ending) for each, (kind, ending, *_) in drawn]
        kinds = zip(names, parts, strict=True)
        self.many.update(each for each, (kind, *_) in kinds if kind in OUTSIDE)

        def put() -> Any:
            if shape == "chain":
                return chain(*steps).enqueue(name=name, on_failure=policy)
            if shape == "group":
                return group(steps[:-1]).then(steps[-1]).enqueue(name=name, on_failure=policy)
            added: list[Any] = []
            with Workflow(name, on_failure=policy) as w:
                for step, (_, _, own, *before) in zip(steps, parts, strict=True):
                    after = [added[int(number)] for number in before]
                    added.append(w.add(step, after=after, on_failure=own))
            return w.handle

        self.flows.enqueue(process, names, put)

    def _withdraw(self, process: Simulated, kind: str, name: str, ending: str) -> None:
        if kind in ("stream", "unique", "debounced"):
            kind = "atomic"

        def undo() -> None:
            with transaction.atomic():
                self.kinds.enqueuing(kind, name, ending)()
                raise ValueError("the request fails")

        self.withdrawn.add(name)
        process.ask(undo)

    # --- Time -------------------------------------------------------------------------------------

    def _pass(self, seconds: float) -> None:
        self.clock.advance(seconds)
        now = self._now()
        paused = (f for process in self.by_number.values() for f in process.busy)
        if seconds > FROZEN or any(now - fiber.paused_at > FROZEN for fiber in paused):
            self.is_calm = False

    def _now(self) -> float:
        return self.clock.offset

    def _finish(self) -> None:
        """Let everybody who has begun a step end it."""
        was_stuck = False
        while busy := [(p, f) for p in self.by_number.values() for f in p.busy]:
            calls = sum(process.boundary.call_count for process, _ in busy)
            for process, fiber in busy:
                if fiber.is_busy:
                    self._resume(process, fiber)
            left = [(p, f) for p in self.by_number.values() for f in p.busy]
            has_gone_on = calls < sum(process.boundary.call_count for process, _ in left)
            are_blocked = all(fiber.is_blocked for _, fiber in left)
            if len(left) == len(busy) and are_blocked and not has_gone_on:
                until = min(fiber.until for _, fiber in left)
                # The last one of the round may have given back what the first one waits for.
                if until == inf and was_stuck:
                    raise AssertionError(f"they wait for one another: {[f.name for _, f in left]}")
                was_stuck = until == inf
                if not was_stuck:
                    self._pass(max(0.001, until - self._now()))
            else:
                was_stuck = False

    # --- Processes --------------------------------------------------------------------------------

    def _fiber(self, name: str) -> Fiber:
        if not self._idle:
            self._fibers.append(Fiber(self._now))
            self._idle.append(self._fibers[-1])
        fiber = self._idle.pop()
        fiber.name, fiber.trace = name, self.trace
        return fiber

    def _start(self, number: int) -> None:
        if number in self.by_number:
            return
        self._started += 1
        boundary = SimulatedBoundary(self.touched)
        renewed_at = self.limited.renewed_at
        renewed_at[boundary] = time.monotonic()
        process = Simulated(
            f"process-{number}-{self._started}",
            boundary,
            self._fiber,
            self.clock,
            partial(renewed_at.__setitem__, boundary),
            self.limited.begin_round,
            self.lost_leases.extend,
        )
        self.by_number[number] = process
        self.processes.append(process)

    def _stop(self, process: Simulated) -> None:
        """Stop it as SIGTERM does, once what its threads do has ended; not while they wait."""
        for fiber in process.busy:
            self._resume(process, fiber)
        if process.busy or process.boundary.is_dead:
            return
        fiber = process.fiber("web")
        fiber.begin(process.stop)
        self._resume(process, fiber)
        if fiber.is_busy:
            self._finish()
        if not process.boundary.is_dead:
            self._forget(process)

    def _hang(self, process: Simulated, lane: str) -> None:
        """Let a lane's handler hang. What it does outside a transaction may be done twice."""
        if fiber := process.hang(lane):
            self.limited.give_up(fiber)
            self.is_calm = False

    def _bury(self, process: Simulated) -> None:
        has_begun = bool(process.busy) or process.boundary.is_dead
        process.die()
        self._forget(process)
        self.is_calm = False
        if has_begun:
            self.excuse()

    def _forget(self, process: Simulated) -> None:
        self.by_number = {n: each for n, each in self.by_number.items() if each is not process}
        if process.boundary.is_dead or process.is_stopped:
            self.processes.remove(process)
        self._idle += process.fibers.values()
        process.fibers = {}

    def recover(self) -> None:
        rounds, beats = iter(ROUNDS), True
        for number in count():
            if number == MOST_ROUNDS:
                raise Endless(f"{Job.objects.unfinished().count()} jobs are put off for ever")
            has_done, beats = self._turn_all(beats), False
            if has_done:
                rounds = iter(ROUNDS)  # each of many may ask to be waited for
            elif (seconds := self._next_start()) > 0.0:
                self.clock.advance(seconds)
                beats = True
            elif self.is_done() or self._is_held() or (seconds := next(rounds, None)) is None:
                break
            else:
                self.clock.advance(seconds)
                beats = True
        for _ in range(3):
            self.clock.advance(20)
            for process in self.processes:
                process.part("beat")

    def _next_start(self) -> float:
        """Return in how many seconds a job with a limit that is on its way may start: a permit is
        void if nobody looks at its moment. 0: none is, soon."""
        now, waiting = timezone.now(), Job.objects.open().filter(handler__startswith=PREFIX)
        dues = waiting.filter(available_at__gt=now).values_list("available_at", flat=True)
        if not waiting.exists():
            return 0.0
        self.clock.advances = 0
        seconds = [(due - now).total_seconds() for due in dues]
        for process in self.processes:
            process.boundary.call_count = 0
            until = [moment for moment, *_ in process.worker.scheduler._delayed]
            seconds += [moment - time.monotonic() for moment in until]
        return min((each for each in seconds if 0.0 < each < SOON), default=0.0)

    def is_done(self) -> bool:
        return super().is_done() and not Schedule.objects.filter(next_at__isnull=False).exists()

    def _is_held(self) -> bool:
        """Return whether nothing can happen any more but that somebody repeats a step."""
        held = WorkflowRow.objects.filter(state=states.WorkflowState.HELD).exists()
        running = WorkflowRow.objects.filter(state=states.WorkflowState.RUNNING).exists()
        return held and not running and not Job.objects.filter(state__in=states.OPEN).exists()

    def _turn_all(self, beats: bool) -> bool:
        """Let each process take a turn; return whether anything was done."""
        done = [process.turn(beats=beats) for process in self.processes]
        return any(done)

    def enqueue(self, process: Process, name: str, *arguments: Any, **options: Any) -> Any:
        began = len(self.trace)
        try:
            return super().enqueue(process, name, *arguments, **options)
        finally:
            self._spans[name] = began, len(self.trace)

    def _is_in_order(self, order: Sequence[str], expected: Sequence[str]) -> bool:
        """Of two requests that overlapped, either job may be the first."""
        return not any(
            self._spans[later][1] <= self._spans[earlier][0]
            for number, earlier in enumerate(order)
            for later in order[number + 1 :]
        )

    def _goes_out_once(self) -> bool:
        return self.is_calm


def _produce_once() -> None:
    with contextlib.suppress(CommandError):  # it says what it could not do
        call_command("kjo_produce", "--once", verbosity=0, stdout=io.StringIO())


def _replay(which: str) -> Any:
    chosen = dead_letters.DeadLetterFilter()
    if which == "oldest":
        letter = DeadLetter.objects.order_by("id").values_list("id", flat=True).first()
        chosen = dead_letters.DeadLetterFilter(ids=[letter] if letter is not None else [])
    return dead_letters.replay(chosen, actor="somebody")


def _replay_all() -> Any:
    return _replay("all")


def _discard() -> Any:
    return dead_letters.discard(dead_letters.DeadLetterFilter(), note="given up", actor="somebody")


def _retry_flows() -> Any:
    return workflows.retry(WorkflowRow.objects.all(), actor="somebody")


def _cancel_flows() -> Any:
    return workflows.cancel(WorkflowRow.objects.all(), actor="somebody")


def _cancel_step(number: str) -> Any:
    steps = Job.objects.filter(stage__isnull=False, state__in=states.UNFINISHED).order_by("id")
    return operations.cancel(steps[int(number) : int(number) + 1])


_CHANGES: dict[str, Callable[..., Any]] = {
    "cancel-step": _cancel_step,
    "cancel-flow": _cancel_flows,
    "retry-flow": _retry_flows,
    "discard": _discard,
}


@contextlib.contextmanager
def simulated(transport: str, template: Path) -> Iterator[Simulation]:
    """Yield a simulation on a copy of a migrated SQLite file, in memory where there is such a
    folder."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    monkeypatch = pytest.MonkeyPatch()
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        path = Path(folder) / "simulation.sqlite3"
        shutil.copyfile(template, path)
        options = {"timeout": 0, "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF"}
        touched: set[str] = set()
        with (
            led_to({**sqlite_settings(path), "OPTIONS": options}),
            override_settings(KJO=kjo(transport), TASKS=TASKS),
            built(monkeypatch, partial(_empty, touched), Simulation, stands=True) as simulation,
        ):
            simulation.touched = touched
            simulation.install(monkeypatch)
            try:
                yield simulation
            finally:
                simulation.uninstall()
                monkeypatch.undo()


def _empty(touched: set[str]) -> None:
    """Empty the tables that the last schedule has written to."""
    forget_groups()
    if touched:
        with transaction.atomic(), connections["default"].cursor() as cursor:
            for table in sorted(touched):
                cursor.execute(f'DELETE FROM "{table}"')
            cursor.execute("DELETE FROM sqlite_sequence")
    touched.clear()
