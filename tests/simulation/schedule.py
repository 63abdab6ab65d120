"""What a seed draws: a list of steps, each by itself, so that any of them can be left out.

Each schedule has a character of its own (swarm testing, Groce et al. 2012): what it is about, which
kinds of jobs, endings and faults there are, and how often each thread of a process has its turn,
differ widely from seed to seed. Jobs are few and share a key and two ids, so that they meet.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from tests.simulation.fibers import CallFault

THREADS = {
    "enqueue": "web",
    "withdraw": "web",
    "others": "web",
    "cancel": "web",
    "replay": "web",
    "produce": "produce",
    "beat": "beat",
    "relay": "relay",
    "poll": "poll",
    "lane": "lane",
    "lane-2": "lane-2",
    "loop": "loop",
    "record": "recorder",
}
"""The thread of a process that takes a step of this action."""
TICKING = {"schedule": "web", "tick": "schedules"}
"""Those of periodic schedules, which are put into some of the schedules that were drawn."""
LIMITING = {"line": "line"}
"""That of the lines of limits, which is put into schedules with jobs that have some."""
RELEASING = ("", "", "commit", "DELETE kjo_held_job", "UPDATE kjo_held_job", "UPDATE kjo_job")
"""How the names of the calls begin that release jobs that wait in line."""
FLOWING = dict.fromkeys(("flow", "cancel-step", "cancel-flow", "retry-flow", "discard"), "web")
"""Those of workflows, which are put into other schedules."""
STEP_KINDS = ("atomic", "database-only", "outside", "async", "coroutine", "batch", "batch-outside")
STEP_ENDINGS = (*("completed",) * 4, "retried", "dead", "until-mended")
COUNTING = (
    *("", "commit", "commit", "UPDATE kjo_workflow", "UPDATE kjo_job", "UPDATE kjo_job"),
    *("INSERT kjo_job_failure", "INSERT kjo_dead_letter", "coordination", "subscription"),
)
"""How the names of the calls begin that count steps and release others."""
KINDS = (
    *("atomic", "database-only", "outside", "async", "coroutine"),
    *("batch", "batch-outside", "queue", "unique", "task", "stream"),
    *("debounced", "levels"),
)
LIMITED = (
    *("rated", "rated-outside", "rated-coroutine", "rate-and-slots"),
    *("slots", "slots-outside", "two-slots-outside", "slots-coroutine"),
)
"""Kinds with limits, which some jobs of some of the schedules that were drawn are given."""
ENDINGS = ("completed", "retried", "dead", "paused", "until-mended")
LANES = ("lane", "lane-2")
IN_HANDLER = "INSERT ledger"
"""How the name of the call begins that a handler makes."""
HANGING = ("atomic", "outside", "outside", "batch-outside", "rated-outside", "slots-outside")
"""Kinds of which one hangs in the midst of a group."""
MOST_PROCESSES = 3
UNIQUE_IDS = ("u0", "u1")
RELAYING = ("others", "produce", "relay", "enqueue")
GROUPS = ("enqueue", "work", "lane", "lane-2", "loop", "record", "time")
REPLAYING = ("enqueue", "work", "replay", "time")
THEMES = ((), (), RELAYING, GROUPS, GROUPS, REPLAYING)
"""Actions that a schedule is mostly about; none: it is about any."""
POINTS = {
    "web": ("", "", "INSERT", "UPDATE", "commit"),
    "produce": ("", "coordination", "transport.publish", "transport.publish", "UPDATE", "DELETE"),
    "beat": ("", "", "coordination.release"),
    "relay": ("", "coordination", "transport.publish", "transport.publish", "UPDATE", "DELETE"),
    "poll": ("", "subscription.poll", "UPDATE", "DELETE", "commit"),
    "lane": (
        *("", "commit", "commit", "INSERT ledger", "INSERT processed", "INSERT kjo_job_failure"),
        *("UPDATE kjo_job", "UPDATE kjo_job", "coordination", "subscription", "transport"),
        "INSERT kjo_job_failure",
    ),
}
"""How the names of the calls begin among which the one that something befalls is drawn."""
RECORDING = (
    *("", "commit", "INSERT kjo_job_failure", "INSERT kjo_job_failure", "UPDATE kjo_job"),
    *("INSERT kjo_dead_letter", "coordination.release", "subscription.acknowledge"),
)
"""Those of a lane by which endings are recorded, acknowledged and announced."""
NTH = (0, 0, 0, 0, 1, 1, 2, 3, 5, 9)
CALM = (CallFault.PAUSES_BEFORE, CallFault.PAUSES_AFTER)


@dataclass(frozen=True)
class Step:
    """One step of one thread of a process, or of the world.

    :param who: number of the process; one that is dead, or never began, does nothing.
    :param what: what the action is about; of "go" the thread that goes on where it paused.
    :param fault: what befalls the step's call number ``nth`` whose name begins with ``at``.
    """

    action: str
    who: int = 0
    what: tuple[str, ...] = ()
    seconds: float = 0.0
    fault: str = ""
    at: str = ""
    nth: int = 0


def drawn(seed: int, count: int) -> list[Step]:
    """Return the schedule of a seed."""
    steps = _Draw(random.Random(f"schedule {seed}"), count).steps
    steps = _with_limits(steps, random.Random(f"limits {seed}"))
    steps = _with_ticks(steps, random.Random(f"ticks {seed}"))
    steps = _with_flows(steps, random.Random(f"flows {seed}"))
    steps = _with_hangs(steps, random.Random(f"hangs {seed}"))
    steps = _with_late_releases(steps, random.Random(f"releases {seed}"))
    return _with_deaths(steps, random.Random(f"deaths {seed}"))


def _with_limits(steps: list[Step], chance: random.Random) -> list[Step]:
    """Return the schedule with limits for many of its jobs, one time in three: processes meet in
    their handlers, and time passes in small parts."""
    if chance.random() > 1 / 3:
        return steps
    kinds = chance.sample(LIMITED, chance.choice((1, 2, 2, 3)))
    found = []
    for step in steps:
        what = list(step.what)
        if step.action == "enqueue":
            for at in range(0, len(what), 3):
                if what[at] not in ("unique", "stream", "debounced") and chance.random() < 0.7:
                    what[at] = chance.choice(kinds)
        found.append(replace(step, what=tuple(what)))
    for number in range(len(steps) // 10):
        at = chance.randrange(MOST_PROCESSES, len(found) + 1)
        found[at:at] = _limited_work(number, kinds, chance)
    return found


def _limited_work(number: int, kinds: Sequence[str], chance: random.Random) -> list[Step]:
    """Return the steps in which jobs with limits come while others may still run."""
    sender, *_ = everybody = chance.sample(range(MOST_PROCESSES), MOST_PROCESSES)
    found, going = [], []
    # Of one kind and without a key they may meet in their handlers.
    is_one = chance.random() < 0.6
    kind, pause_rate = chance.choice(kinds), 0.8 if is_one else 0.5
    for lane in ("lane", "lane-2"):
        jobs: list[str] = []
        for each in range(1 if is_one else chance.choice((1, 1, 2, 3))):
            ending = chance.choice(("completed", "completed", "retried", *ENDINGS))
            letter = "f" if is_one else chance.choice("kf")
            own = kind if is_one else chance.choice(kinds)
            jobs += own, f"{letter}{lane}{number}.{each}", ending
        found += [Step("enqueue", sender, tuple(jobs)), Step("relay", sender)]
        for who in everybody:
            step = Step(lane, who)
            if chance.random() < pause_rate:
                at = chance.choice((*("INSERT ledger",) * 4, "coordination", ""))
                fault, nth = chance.choice(CALM).value, chance.choice(NTH[:5])
                step = replace(step, fault=fault, at=at, nth=nth)
                going.append(Step("go", who, (lane,)))
            others = chance.sample(("beat", "lane", "loop", "record"), 1)
            found += [Step("poll", who), Step("poll", who), step]
            found += [Step(each, who) for each in others]
            advance = Step("line", who)
            if chance.random() < 0.3:
                fault, at = chance.choice(CALM).value, chance.choice(RELEASING)
                advance = replace(advance, fault=fault, at=at, nth=chance.choice(NTH[:5]))
                going.append(Step("go", who, ("line",)))
            found.append(advance)
    chance.shuffle(going)
    return [*found, Step("time", seconds=chance.choice((0.1, 0.4, 1.0))), *going]


def _with_ticks(steps: list[Step], chance: random.Random) -> list[Step]:
    """Return the schedule with periodic schedules in it, one time in three.

    Nothing befalls their calls but what befalls others in it.
    """
    if chance.random() > 1 / 3:
        return steps
    calm = [fault.value for fault in CALM]
    faults = [*calm, *(step.fault for step in steps if step.fault)]
    found = list(steps)
    for _ in range(len(steps) // 4):
        who, at = chance.randrange(MOST_PROCESSES), chance.randrange(MOST_PROCESSES, len(found) + 1)
        fault = chance.choice(faults) if chance.random() < 0.5 else ""
        point = chance.choice(("", "INSERT", "UPDATE", "commit", "SELECT"))
        step = Step("tick", who, fault=fault, at=point if fault else "", nth=chance.choice(NTH[:7]))
        found[at:at] = [step, Step("time", seconds=chance.choice((0.5, 2.0)))]
        if fault in calm:
            later = chance.randrange(at + 1, len(found) + 1)
            found[later:later] = [Step("go", who, ("schedules",))]
    for number in range(chance.choice((1, 2, 4))):
        who, at = chance.randrange(MOST_PROCESSES), chance.randrange(MOST_PROCESSES, len(found))
        found[at:at] = [Step("schedule", who, (f"s{number}",))]
    return found


def _with_flows(steps: list[Step], chance: random.Random) -> list[Step]:
    """Return the schedule with workflows in it, one time in two, and work on their steps.

    Nothing befalls their calls but what befalls others in it.
    """
    if chance.random() > 1 / 2:
        return steps
    calm = [fault.value for fault in CALM]
    faults = [*calm, *(step.fault for step in steps if step.fault)]
    found, endings = list(steps), chance.sample(STEP_ENDINGS, 4)

    def put(step: Step, fault_rate: float, points: tuple[str, ...], last: int = 0) -> None:
        at = chance.randrange(MOST_PROCESSES, last or len(found) + 1)
        if chance.random() < fault_rate:
            fault, nth = chance.choice(faults), chance.choice(NTH[:7])
            step = replace(step, fault=fault, at=chance.choice(points), nth=nth)
        found[at:at] = [step]
        if step.fault in calm:
            thread = (THREADS | FLOWING)[step.action]
            later = chance.randrange(at + 1, len(found) + 1)
            found[later:later] = [Step("go", step.who, (thread,))]

    for number in range(chance.choice((1, 2, 3))):
        flow = Step("flow", chance.randrange(2), _flow_of(chance, f"w{number}", endings))
        put(flow, 0.1, POINTS["web"], len(steps) // 3)
    changes = [*FLOWING, "replay", "mend"][1:]
    for action in chance.sample(changes, chance.choice((0, 1, 2, 4))):
        what = (str(chance.randrange(4)),) if action == "cancel-step" else ()
        what = ("all",) if action == "replay" else what
        points = ("", "UPDATE", "commit")
        put(Step(action, chance.randrange(MOST_PROCESSES), what), 0.3 * (action != "mend"), points)
    for _ in range(len(steps) // 5):
        who, at = chance.randrange(2), chance.randrange(MOST_PROCESSES, len(found) + 1)
        found[at:at] = [Step(action, who) for action in ("relay", "poll", "poll", "lane")]
        action = chance.choice(("lane", "lane", "loop", "record", "lane-2"))
        put(Step(action, who), 0.4, COUNTING)
    return found


def _with_hangs(steps: list[Step], chance: random.Random) -> list[Step]:
    """Return the schedule with handlers that hang until their threads are given up, one time in
    three: some of those that pause there, and others in the midst of a group."""
    if chance.random() > 1 / 3:
        return steps
    found, kinds = list[Step](), chance.sample(HANGING, chance.choice((1, 1, 2)))
    for number, step in enumerate(steps):
        found.append(step)
        if step.action in LANES and step.fault and step.at == IN_HANDLER and chance.random() < 0.5:
            found += _hang(step.who, step.action, chance)
        if number >= MOST_PROCESSES and chance.random() < 0.02:
            found += _hanging_work(number, kinds, chance)
    return found


def _hang(who: int, lane: str, chance: random.Random) -> list[Step]:
    """Return the steps in which a handler that pauses hangs, and its thread is given up."""
    found = [Step(chance.choice(("record", "beat", "loop")), who)]
    found += [Step("hang", who, (lane,)), Step(lane, who)]
    found.insert(chance.randrange(2, 4), Step("go", who, (f"hung-{lane}",)))
    return found


def _hanging_work(number: int, kinds: Sequence[str], chance: random.Random) -> list[Step]:
    """Return the steps in which one handler of a group hangs."""
    sender, *_ = everybody = chance.sample(range(MOST_PROCESSES), MOST_PROCESSES)
    jobs: list[str] = []
    for each in range(chance.choice((2, 3, 5))):
        ending = chance.choice(("retried", *ENDINGS))
        jobs += chance.choice(kinds), f"fhang{number}.{each}", ending
    found = [Step("enqueue", sender, tuple(jobs)), Step("relay", sender)]
    for who in everybody:
        lane, fault, nth = chance.choice(LANES), chance.choice(CALM).value, chance.choice(NTH[:6])
        found += [Step("poll", who), Step("poll", who)]
        found.append(Step(lane, who, fault=fault, at=IN_HANDLER, nth=nth))
        found += _hang(who, lane, chance)
    return found


def _is_calm(steps: Sequence[Step]) -> bool:
    """Return whether nothing worse than a pause befalls anybody."""
    calm = {"", *(fault.value for fault in CALM)}
    return all(step.fault in calm and step.action != "die" for step in steps)


def _with_late_releases(steps: list[Step], chance: random.Random) -> list[Step]:
    """Return a schedule of outages in which leases are released late, one time in three: while
    others take them anew."""
    if chance.random() > 1 / 3 or _is_calm(steps):
        return steps
    found = list(steps)
    for number in range(chance.choice((1, 2, 3))):
        at = chance.randrange(MOST_PROCESSES, len(found) + 1)
        found[at:at] = _late_release(number, chance)
    return found


def _late_release(number: int, chance: random.Random) -> list[Step]:
    """Return the steps in which a lease is not released when its job has failed, and is while the
    job's next attempt takes it."""
    everybody = chance.sample(range(MOST_PROCESSES), MOST_PROCESSES)
    ending, pause = chance.choice(("retried", "paused", *ENDINGS)), CallFault.PAUSES_BEFORE.value
    found, kind = list[Step](), chance.choice((*HANGING[1:], "slots-coroutine"))
    for fault in (chance.choice(("raises-before", "raises-after")), ""):
        # The next one may take the slot of the first.
        job = kind, f"flate{number}.{bool(fault):d}", ending
        found += [Step("enqueue", everybody[0], job), Step("relay", everybody[0])]
        for who in everybody:
            found += [Step("poll", who), Step("poll", who)]
            release = "coordination.release"
            if fault:
                found.append(Step("lane", who, fault=fault, at=release))
                continue
            found.append(Step("beat", who, fault=pause, at=release))
            found.append(Step("lane", who, fault=pause, at=IN_HANDLER))
            found += [Step("go", who, ("beat",)), Step("beat", who), Step("go", who, ("lane",))]
        found.append(Step("time", seconds=chance.choice((2.0, 5.0))))
    return found


def _with_deaths(steps: list[Step], chance: random.Random) -> list[Step]:
    """Return a schedule of workflows and outages with workers that end right after a lane's step:
    they may have steps that they have released and not begun."""
    if _is_calm(steps) or not any(step.action == "flow" for step in steps):
        return steps
    found = []
    for step in steps:
        found.append(step)
        if step.action == "lane" and chance.random() < 0.15:
            found += [Step(chance.choice(("die", "die", "stop")), step.who)]
            found += [Step("start", step.who)]
    return found


def _flow_of(chance: random.Random, name: str, endings: Sequence[str]) -> tuple[str, ...]:
    """Return a workflow: its name, its shape, what becomes of steps when others fail, and its
    steps. Each of these is its kind, its ending, its own policy, and the numbers of those it waits
    for."""
    policies = ("cancel", "run", "hold")
    shape, flow_policy = (
        chance.choice(("chain", "group", "graph", "graph")),
        chance.choice(policies),
    )
    steps = []
    for number in range(chance.randint(2, 7)):
        kind = "adding" if chance.random() < 0.1 else chance.choice(STEP_KINDS)
        ending, policy = chance.choice(endings), chance.choice((flow_policy, *policies))
        before = chance.sample(range(number), min(number, chance.choice((0, 1, 1, 2, 3))))
        steps.append(" ".join([kind, ending, policy, *map(str, before)]))
    if shape == "group" and chance.random() < 0.5:  # equal siblings share a stage
        steps = [steps[0]] * (len(steps) - 1) + steps[-1:]
    return (name, shape, flow_policy, *steps)


class _Draw:
    """Two in five schedules meet pauses only: without outages and deaths more is promised."""

    def __init__(self, chance: random.Random, count: int) -> None:
        self._chance = chance
        is_calm = chance.random() < 0.4
        self._kinds = chance.sample(KINDS, chance.choice((1, 1, 2, 3, 6)))
        self._endings = chance.sample(ENDINGS, chance.choice((1, 2, 3)))
        self._faults = CALM
        if not is_calm:
            kinds = [fault for fault in CallFault if fault not in CALM]
            self._faults += tuple(chance.sample(kinds, chance.choice((0, 1, 1, 3))))
        self._points = dict(POINTS)
        self._fault_rate = chance.choice((0.1, 0.3, 0.6))
        self._times = (0.1, 0.5, 2.0) if is_calm else (0.5, 2.0, 11.0, 41.0)
        self._end_rate = chance.choice((0.0, 0.02, 0.06))
        self._death_rate = 0.0 if is_calm else chance.choice((0.0, 0.5, 1.0))
        self._resume_rate = chance.choice((0.1, 0.25, 0.5))
        weights: dict[str, tuple[int, ...]] = dict.fromkeys(THREADS, (0, 0, 1, 4))
        weights |= dict.fromkeys(("time", "mend"), (0, 1, 3))
        weights |= dict.fromkeys(("enqueue", "relay", "poll", "lane", "work"), (2, 5, 10))
        weights |= dict.fromkeys(("loop", "record"), (1, 3))
        theme = chance.choice(THEMES)
        if theme:
            weights |= dict.fromkeys(weights, (0, 0, 0, 1)) | dict.fromkeys(theme, (2, 5))
            weights["mend"] = (0,)
        if theme is REPLAYING:
            self._kinds, self._endings = ["unique", *self._kinds[:1]], ["until-mended", "completed"]
        elif theme is GROUPS:
            self._endings = ["completed", chance.choice(("dead", "retried"))]
            self._points["lane"] = RECORDING
            if not is_calm:
                self._faults = tuple(each for each in CallFault if each != CallFault.DIES_AFTER)
        self._weights = {action: chance.choice(each) for action, each in weights.items()}
        self._process_weights = [chance.choice((1, 3)) for _ in range(MOST_PROCESSES)]
        self._alive = set(range(chance.choice((2, 2, 3))))
        if theme is GROUPS:
            self._alive = {0}  # jobs that are polled by one process share groups
        self._paused: list[tuple[int, str]] = []
        self.steps = [Step("start", number) for number in sorted(self._alive)]
        while len(self.steps) < count:
            self.steps += self._step(len(self.steps))
        if theme is REPLAYING or chance.random() < 0.2:
            self.steps += [Step("mend"), *self._work(), *self._replay(), *self._work()]

    def _step(self, number: int) -> list[Step]:
        chance = self._chance
        missing = set(range(MOST_PROCESSES)) - self._alive
        if not self._alive or (missing and chance.random() < self._end_rate):
            self._alive.add(min(missing))
            return [Step("start", min(missing))]
        if self._paused and chance.random() < self._resume_rate:
            who, thread = self._paused.pop(chance.randrange(len(self._paused)))
            return self._with_fault(Step("go", who, (thread,)), thread)
        alive = sorted(self._alive)
        (who,) = chance.choices(alive, [self._process_weights[each] for each in alive])
        if chance.random() < self._end_rate:
            self._alive.discard(who)
            return [Step("die" if chance.random() < self._death_rate else "stop", who)]
        (action,) = chance.choices(list(self._weights), list(self._weights.values()))
        if action == "time":
            return [Step("time", seconds=chance.choice(self._times))]
        if action == "mend":
            return [Step("mend")]
        if action == "work":
            return self._work()
        return self._with_fault(Step(action, who, self._what(action, number)), THREADS[action])

    def _work(self) -> list[Step]:
        """Return the steps that bring jobs from one process to another's lane."""
        sender, worker = self._chance.choices(sorted(self._alive) or [0], k=2)
        actions = ("relay", "poll", "poll", "lane", self._chance.choice(("loop", "lane", "record")))
        steps = [Step(each, sender if each == "relay" else worker) for each in actions]
        return [each for step in steps for each in self._with_fault(step, THREADS[step.action])]

    def _replay(self) -> list[Step]:
        return [Step("replay", min(self._alive, default=0), self._what("replay", 0))]

    def _meeting(self, who: int, thread: str) -> list[Step]:
        """Return what others may do before this thread goes on, and may clash with it."""
        actions = ["poll", "lane"]
        if thread in ("relay", "produce"):
            actions = self._chance.choice((["poll", "poll", "lane"], ["produce"], ["relay"]))
        others = sorted(self._alive)
        self._chance.shuffle(others)
        meeting = [Step(action, each) for each in others for action in actions]
        return [*meeting, Step("go", who, (thread,))]

    def _what(self, action: str, number: int) -> tuple[str, ...]:
        chance = self._chance
        if action == "others":
            return (f"r{number}",)
        if action == "replay":
            return (chance.choice(("all", "oldest")),)
        if action not in ("enqueue", "withdraw"):
            return ()
        jobs: list[str] = []
        for each in range(chance.choice((1, 1, 2, 3, 4))):
            kind = chance.choice(self._kinds)
            if kind == "unique":
                prefix = f"{chance.choice(UNIQUE_IDS)}-"
            else:
                prefix = "too-large-" if chance.random() < 0.02 else chance.choice("kf")
            jobs += kind, f"{prefix}{number}.{each}", chance.choice(self._endings)
        return tuple(jobs)

    def _with_fault(self, step: Step, thread: str) -> list[Step]:
        """Return the step with what befalls it, if anything does, and what others do meanwhile."""
        chance = self._chance
        if chance.random() > self._fault_rate:
            return [step]
        fault = chance.choice(self._faults)
        at = chance.choice(self._points.get(thread, self._points["lane"]))
        nth = chance.choice(NTH[:5] if at in RECORDING[1:] else NTH)
        step = replace(step, fault=fault.value, at=at, nth=nth)
        if fault in CALM and chance.random() < 0.4:
            return [step, *self._meeting(step.who, thread)]
        if fault in CALM:
            self._paused.append((step.who, thread))
        return [step]


def dumped(steps: Sequence[Step]) -> str:
    """Return a schedule as JSON, a step a line."""
    defaults = asdict(Step(""))
    lines = [
        json.dumps({name: each for name, each in asdict(step).items() if each != defaults[name]})
        for step in steps
    ]
    return "[\n" + ",\n".join(lines) + "\n]"


def loaded(text: str) -> list[Step]:
    """Undo ``dumped``."""
    return [Step(**{**each, "what": tuple(each.get("what", ()))}) for each in json.loads(text)]


def shrunk(steps: list[Step], fails: Callable[[list[Step]], bool]) -> list[Step]:
    """Return a part of a schedule that still fails, of which no step and no fault can be left out.

    :param fails: whether a schedule fails.
    """
    steps, size = _with_less(steps, fails, len(steps) // 2), 0
    for at, step in enumerate(steps):
        for simpler in _simpler(step):
            changed = [*steps[:at], simpler, *steps[at + 1 :]]
            if fails(changed):
                steps, size = changed, 1
                break
    return _with_less(steps, fails, size)


def _with_less(steps: list[Step], fails: Callable[[list[Step]], bool], size: int) -> list[Step]:
    """Return a part of a schedule that still fails, of which no step can be left out.

    :param size: how many steps in a row are left out at first; 0: none is.
    """
    while size:
        at, before = 0, len(steps)
        while at < len(steps):
            without = steps[:at] + steps[at + size :]
            if fails(without):
                steps = without
            else:
                at += size
        if size > 1 or len(steps) == before:
            size //= 2
    return steps


def _simpler(step: Step) -> list[Step]:
    """Return a step in simpler forms, the simplest first."""
    found = [replace(step, fault="", at="", nth=0)] if step.fault else []
    if step.action == "flow" and len(step.what) > 5:
        found += [replace(step, what=step.what[:-1])]
    if step.action == "enqueue" and len(step.what) > 3:
        parts = [step.what[start : start + 3] for start in range(0, len(step.what), 3)]
        found += [replace(step, what=part) for part in parts]
    return found
