"""What must hold after a mixed load, whatever was done to it. Pure: evidence in, complaints out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from statistics import mean, median

from kjo_django.engine.handler.timeouts import LONG_RUN
from kjo_django.outbox.relay import LEASE_TTL
from tests.acceptance.moments import Moment, most_within
from tests.mixed.plan import BUSY, RATE, SLOTS, Engine, Work

SOON = 2.0
"""Seconds until an idle queue's job starts at the latest, on a machine that has the time."""
SLOWER = 4.0
"""Times an idle worker's latency that the limit is raised by."""
CALM_AFTER = 4.0
"""Seconds after a worker or server came or went in which an idle queue may wait."""
UNTOLD = 5.0
"""Seconds after an end in which the process that recorded it may be killed before it told."""


@dataclass(frozen=True, slots=True)
class Row:
    """A job's row, as far as the model cares."""

    id: str
    name: str
    state: str
    is_record: bool = False
    """Whether it is a record for others rather than a job."""
    finished_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter's row."""

    id: str
    name: str
    reason: str
    failed_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Begin:
    """A handler began, or ended."""

    at: float
    pid: int


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease that is left when everything has stopped."""

    name: str
    expires: bool


@dataclass
class Evidence:
    """What a run left behind."""

    engine: Engine
    works: dict[str, Work]
    committed: dict[str, float] = field(default_factory=dict)
    """When the transaction of each piece of work returned from its commit."""
    writes: list[tuple[float, float]] = field(default_factory=list)
    """When the application's transactions were committed, and how long each took."""
    paces: list[tuple[float, float]] = field(default_factory=list)
    """How many times longer than on an idle machine work took, at moments of the run."""
    processor_count: int = 2
    unsure: set[str] = field(default_factory=set)
    """Work whose commit or publishing raised: it may be there or not."""
    entries: list[tuple[str, str]] = field(default_factory=list)
    """Key and name of each entry of the ledger, oldest first."""
    rows: list[Row] = field(default_factory=list)
    letters: list[Letter] = field(default_factory=list)
    begins: dict[str, list[Begin]] = field(default_factory=dict)
    signals: dict[str, list[str]] = field(default_factory=dict)
    killed: dict[int, float] = field(default_factory=dict)
    """When each process that was killed, by us or by a handler, ended."""
    disturbances: list[tuple[float, float, str]] = field(default_factory=list)
    """From when to when something was done to workers or servers, and what."""
    records: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Records for others found in their topic: when each was published."""
    starts: dict[str, list[Moment]] = field(default_factory=lambda: defaultdict(list))
    """When jobs with a rate were started, by the key that the rate is for."""
    ends: dict[str, list[Begin]] = field(default_factory=lambda: defaultdict(list))
    """When the handlers of jobs with slots ended."""
    frozen: list[tuple[int, float, float]] = field(default_factory=list)
    """Which process was frozen, from when to when."""
    failed: set[str] = field(default_factory=set)
    """Work whose handler met an error of its database: that attempt failed, though not as planned.
    """
    outlived: set[str] = field(default_factory=set)
    """Work of which a worker said that its run had outlived its lease."""
    dead_records: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Records found in the topics of dead letters: when each was published."""
    has_dead_records: bool = False
    """Whether those topics keep their records on this transport."""
    items: dict[str, int] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """Open jobs and unread messages, where there were any when the time was over."""
    workers_that_failed: list[str] = field(default_factory=list)
    """Workers that did not end as they were asked to."""

    def __post_init__(self) -> None:
        self.effects = Counter(name for _, name in self.entries)

    def rows_of(self, name: str) -> list[Row]:
        return [row for row in self._rows_by_name.get(name, []) if not row.is_record]

    def letters_of(self, name: str) -> list[Letter]:
        return self._letters_by_name.get(name, [])

    def index(self) -> None:
        """Make looking up quick, once the evidence is complete."""
        self.effects = Counter(name for _, name in self.entries)
        self._rows_by_name: dict[str, list[Row]] = defaultdict(list)
        self._letters_by_name: dict[str, list[Letter]] = defaultdict(list)
        for row in self.rows:
            self._rows_by_name[row.name].append(row)
        for letter in self.letters:
            self._letters_by_name[letter.name].append(letter)

    def note_repeat(self, name: str, at: float, pid: int, moment: float) -> None:
        """Note that a worker has called the handler of a job with a rate without counting that. It
        may do so again in an attempt whose transaction was undone, whose start it has counted.

        :param moment: when (monotonic) it was called.
        """
        starts = self.starts[self.works[name].key]
        if not any((start.what, start.pid) == (name, pid) for start in starts):
            starts.append(Moment(at, pid, moment, moment, name))

    def was_disturbed(self, begin: float, end: float, but: Collection[str] = ()) -> bool:
        """Whether anything happened to workers or servers between two moments.

        :param but: what does not count.
        """
        return any(
            begin <= to and since <= end and what not in but
            for since, to, what in self.disturbances
        )

    def undisturbed_since(self, begin: float, end: float) -> float:
        """Return the end of the last disturbance that a wait between two moments may be due to;
        the moment it begun, where there was none."""
        return max(
            [begin, *(min(to + 0.001, end) for to in self._ends_of_disturbances(begin, end))]
        )

    def calms_for(self, begin: float, end: float) -> float:
        """Return the seconds from a moment on that a wait until another one may last longer, since
        something was done to workers or servers up to it."""
        ends = self._ends_of_disturbances(begin, end)
        return max(0.0, max(ends, default=0.0) + CALM_AFTER - begin)

    def _ends_of_disturbances(self, begin: float, end: float) -> list[float]:
        harmless = () if self.engine.has_partitions else ("ready", "join")
        return [
            to
            for since, to, what in self.disturbances
            if since <= end and to >= begin - CALM_AFTER and what not in harmless
        ]

    def traces_of(self, name: str) -> str:
        """Everything known of a piece of work, for a complaint."""
        rows = ", ".join(row.state for row in self.rows if row.name == name) or "no row"
        letters = ", ".join(letter.reason for letter in self.letters_of(name)) or "no dead letter"
        begins = [f"{begin.at:.2f} by {begin.pid}" for begin in self.begins.get(name, [])][-4:]
        work = self.works.get(name)
        return (
            f"{name} ({work and (work.kind, work.how, work.fails, work.end, work.copies)}): {rows},"
            f" {letters}, {self.effects[name]} effects, began {begins or 'never'}, signals"
            f" {self.signals.get(name, [])}, committed {self.committed.get(name, 0):.2f}"
            f"{self._deaths_of(name)}"
        )

    def _deaths_of(self, name: str) -> str:
        """Return when it died and its records and dead letters were published, and what was done
        then."""
        died = [letter.failed_at for letter in self.letters_of(name)]
        published = sorted([*self.dead_records.get(name, []), *self.records.get(name, [])])
        if not died and not published:
            return ""
        first, last = min([*died, *published]), max([*died, *published])
        near = [
            f"{what} {since:.2f} to {to:.2f}"
            for since, to, what in self.disturbances
            if since <= last + MOST_NOTED and first - MOST_NOTED <= to
        ]
        times = ", ".join(f"{at:.2f}" for at in published) or "never"
        recorded = ", ".join(f"{at:.2f}" for at in died) or "never"
        return f", died {recorded}, published {times}; beside it: {'; '.join(near) or 'nothing'}"


def complaints(evidence: Evidence) -> list[str]:
    """Return every invariant that does not hold, in words."""
    evidence.index()
    found: list[str] = []
    for invariant in INVARIANTS:
        of_it = list(invariant(evidence))
        if of_it:
            more = f" (and {len(of_it) - 4} more)" if len(of_it) > 4 else ""
            found.append(f"{invariant.__name__}: " + "\n  ".join(of_it[:4]) + more)
    return found


def expected_end(work: Work) -> str:
    """Return how a committed piece of work must end."""
    if work.kind == "other":
        return "published"
    return {"complete": "completed", "cancel": "cancelled"}.get(work.end, "dead")


def _promised(evidence: Evidence) -> Iterator[Work]:
    """Yield the work that must have come to its end."""
    for name in evidence.committed:
        work = evidence.works[name]
        if work.commits and name not in evidence.unsure:
            yield work


# --- The invariants -------------------------------------------------------------------------------


def everything_ends(evidence: Evidence) -> Iterator[str]:
    """Nothing is stuck, and nothing is skipped without a trace: each has its end."""
    yield from (f"left when the time was over: {left}" for left in evidence.left)
    for work in _promised(evidence):
        if not _has_end(evidence, work):
            yield f"no end: {evidence.traces_of(work.name)}"


def _has_end(evidence: Evidence, work: Work) -> bool:
    end, states = expected_end(work), {row.state for row in evidence.rows_of(work.name)}
    if end == "published":
        return bool(evidence.records.get(work.name)) or work.name in evidence.unsure
    if end == "dead":
        return bool(evidence.letters_of(work.name)) and states <= {row_state(work)}
    if end == "cancelled":
        return states == {"cancelled"}
    if work.kind == "item":
        return evidence.items.get(work.name) == COMPLETED_ITEM
    return evidence.effects[work.name] > 0 and states <= {"completed"}


def row_state(work: Work) -> str:
    """Return what the row of a piece of work says in the end, where it has one. A record that KDLQ
    kills has one if its first transaction failed; its processing completes with the kill."""
    if expected_end(work) == "dead":
        return "completed" if work.kind == "kdlq" else "failed"
    return expected_end(work)


COMPLETED_ITEM = 2
"""The number of `ItemState.COMPLETED`."""


def each_effect_is_there_once(evidence: Evidence) -> Iterator[str]:
    """Committed and completed: one effect. Dead, cancelled or rolled back: none."""
    for name, count in evidence.effects.items():
        work = evidence.works.get(name)
        if work is None or not work.commits:
            yield f"of something never committed: {evidence.traces_of(name)}"
        elif expected_end(work) != "completed" and not _may_be_uncancelled(evidence, work):
            yield f"of what did not complete: {evidence.traces_of(name)}"
        elif count > 1 and (work.has_one_effect or not _may_repeat(evidence, name)):
            yield f"{count} times: {evidence.traces_of(name)}"
    for work in _promised(evidence):
        if expected_end(work) == "completed" and not evidence.effects[work.name]:
            yield f"missing: {evidence.traces_of(work.name)}"


def _may_be_uncancelled(evidence: Evidence, work: Work) -> bool:
    """Whether the application lost its connection before it would have cancelled what it saved."""
    return work.end == "cancel" and work.name in evidence.unsure


def _may_repeat(evidence: Evidence, name: str) -> bool:
    """Whether something was done to workers or servers while a handler outside a transaction ran,
    or soon after: then its entry may be there and its outcome not. On SQLite a worker may also wait
    so long for others to have written that its signs of life are missing; it says so then."""
    if evidence.engine.is_sqlite and name in evidence.outlived:
        return True
    begins = evidence.begins.get(name, [])
    ms = evidence.works[name].ms
    return any(
        evidence.was_disturbed(begin.at - 1.0, begin.at + ms / 1000 + UNTOLD) for begin in begins
    )


def each_end_has_one_row(evidence: Evidence) -> Iterator[str]:
    """One row says how it ended, and none says otherwise."""
    for work in _promised(evidence):
        rows, letters = evidence.rows_of(work.name), evidence.letters_of(work.name)
        end = expected_end(work)
        if end == "dead" and not 1 <= len(letters) <= _may_die(evidence, work):
            yield f"{len(letters)} dead letters: {evidence.traces_of(work.name)}"
        if end != "dead" and letters:
            yield f"a dead letter of what was to be {end}: {evidence.traces_of(work.name)}"
        if work.kind not in NO_ROWS and len(rows) != 1:
            yield f"{len(rows)} rows: {evidence.traces_of(work.name)}"
        wanted = row_state(work)
        if any(row.state != wanted for row in rows):
            yield f"its row does not say {wanted}: {evidence.traces_of(work.name)}"


NO_ROWS = frozenset(("event", "foreign", "kdlq", "stream", "item", "other"))
"""Kinds that are no jobs from the beginning."""


def _may_die(evidence: Evidence, work: Work) -> int:
    """Return how many dead letters it may leave: each copy of a message nobody enqueued here is a
    record of its own, and one that died marks nothing. An event is such a message, and a relay may
    publish it again that was interrupted."""
    if work.kind not in ("event", "foreign"):
        return 1
    at = evidence.committed[work.name]
    return (1 + work.copies) * (2 if _may_be_published_again(evidence, at) else 1)


def each_end_is_told(evidence: Evidence) -> Iterator[str]:
    """Its signal was sent at least once, unless its process was killed at that very moment."""
    for work in _promised(evidence):
        word = {"completed": "completed", "dead": "failed"}.get(expected_end(work))
        if word is None or (work.kind == "large" and word == "failed"):
            continue
        if work.kind == "kdlq":
            word = "processed"
        if word not in evidence.signals.get(work.name, []) and not _was_killed(evidence, work):
            yield f"no signal {word!r}: {evidence.traces_of(work.name)}"


def _was_killed(evidence: Evidence, work: Work) -> bool:
    """Whether the process it last ran in was killed before it could tell."""
    begins = evidence.begins.get(work.name)
    if not begins:
        # Ended without a run: any worker may have recorded it.
        ended = [letter.failed_at for letter in evidence.letters_of(work.name)]
        return any(-1 < at - end < UNTOLD for at in evidence.killed.values() for end in ended)
    for begin in begins[-2:]:
        killed_at = evidence.killed.get(begin.pid)
        ran_until = begin.at + work.ms / 1000
        if killed_at is not None and killed_at - ran_until < UNTOLD:
            return True
    return False


def each_key_keeps_its_order(evidence: Evidence) -> Iterator[str]:
    """Of a key, what never failed took effect in the order it was enqueued in. A handler fails as
    well when its database session is ended, or its statement refused, while it runs."""
    if not evidence.engine.keeps_order:
        return
    order = {name: at for at, name in enumerate(evidence.committed)}
    of_keys: dict[str, list[str]] = defaultdict(list)
    for key, name in evidence.entries:
        work = evidence.works.get(name)
        is_sure = name in order and name not in evidence.unsure
        has_failed = work is not None and (work.fails or name in evidence.failed)
        if key and work is not None and is_sure and not has_failed and not work.delay:
            of_keys[key].append(name)
    for key, names in of_keys.items():
        # What ran again outside a transaction counts as it was first.
        names = list(dict.fromkeys(names))
        wanted = sorted(names, key=order.__getitem__)
        if names != wanted:
            at = next(
                i for i, (one, other) in enumerate(zip(names, wanted, strict=True)) if one != other
            )
            found, due = names[at : at + 4], wanted[at : at + 4]
            yield f"{key}: {found} where {due} was enqueued; {evidence.traces_of(due[0])}"


def records_for_others_are_published_once(evidence: Evidence) -> Iterator[str]:
    """Nobody here drops a second copy of them. A relay that dies, or loses its connection, before
    it has noted what it published may publish that again."""
    for name, published in evidence.records.items():
        work = evidence.works.get(name)
        if work is None or not work.commits:
            yield f"never committed: {evidence.traces_of(name)}"
            continue
        before = [evidence.committed.get(name, 0), *sorted(published)[:-1]]
        if len(published) > 1 and not any(_may_be_published_again(evidence, at) for at in before):
            yield f"{len(published)} times: {evidence.traces_of(name)}"


def dead_letters_are_published_once(evidence: Evidence) -> Iterator[str]:
    """Also after a crash, if they were recorded well before it."""
    if not evidence.has_dead_records:
        return
    for work in _promised(evidence):
        if expected_end(work) != "dead" or work.kind in ("kdlq", "large"):
            continue
        published = sorted(evidence.dead_records.get(work.name, ()))
        recorded = [letter.failed_at for letter in evidence.letters_of(work.name)]
        if not published:
            yield f"never: {evidence.traces_of(work.name)}"
        elif len(published) > _may_die(evidence, work) and recorded:
            before = [max(recorded), *published[:-1]]
            if not any(_may_be_published_again(evidence, at) for at in before):
                yield f"{len(published)} times: {evidence.traces_of(work.name)}"


def _may_be_published_again(evidence: Evidence, at: float) -> bool:
    """Whether a publisher died, or lost what it was talking to, before it had noted it. It cannot
    note anything in rows that somebody has locked. Of leases that coordination has forgotten it
    knows when it asks for them next; another one takes them meanwhile."""
    if any(
        what == "flush" and since <= at <= to + FORGOTTEN
        for since, to, what in evidence.disturbances
    ):
        return True
    soon = min(MOST_NOTED, NOTED * _slowness(evidence, at - 1.0, at + NOTED))
    until = at + soon
    for since, to, what in sorted(evidence.disturbances):
        if what == "hold_rows" and since <= until and at <= to:
            until = max(until, to + soon)
    return evidence.was_disturbed(at - 1.0, until, but=HARMLESS)


FORGOTTEN = LEASE_TTL.total_seconds() / 3
"""Seconds a relay goes by its leases after it has taken them."""
NOTED = 1.0
"""Seconds until it is noted what was published, on a machine that has the time."""
MOST_NOTED = 3.0
HARMLESS = frozenset(("ready", "join", "leave", "hold_rows"))
"""Disturbances that interrupt nobody."""


def what_a_lane_could_start_starts_soon(evidence: Evidence) -> Iterator[str]:
    """A job of a queue that has no other starts soon, whatever others do, and so does a quick one
    beside a long one of its handler; soon after it, where something was done to workers or servers.
    """
    idle = _idle_latency(evidence)
    for name, at in evidence.committed.items():
        work = evidence.works[name]
        if work.kind != "probe" and (work.kind != "uneven" or work.ms):
            continue
        begins = evidence.begins.get(name)
        began = min(begin.at for begin in begins) if begins else float("inf")
        since = evidence.undisturbed_since(at, began)
        share = SHARE_OF_MANY if work.kind == "uneven" else SHARE
        slowness = 1 + share * (_slowness(evidence, at, began) - 1)
        limit = SOON * slowness + SLOWER * idle + _wait_for_lock(evidence, at, at + SOON)
        limit += evidence.calms_for(since, began) + (LONG_RUN if work.kind == "uneven" else 0.0)
        if began - since > limit:
            waited = f"{began - since:.2f} s, more than {limit:.2f}"
            yield f"waited {waited}: {evidence.traces_of(name)}"


SHARE = 0.5
"""Share of a start that is work; the rest is waiting, which others do not make longer."""
SHARE_OF_MANY = 1.0
"""The same of one of many that come at once: it waits for the runs of those before it, all work."""


def _slowness(evidence: Evidence, since: float, to: float) -> float:
    """Return how many times slower the machine was then, since others used it too."""
    return max(1.0, mean([pace for at, pace in evidence.paces if since <= at <= to] or [1.0]))


def _wait_for_lock(evidence: Evidence, since: float, to: float) -> float:
    """Return how long a start may wait for SQLite's one lock, to judge by how long others did."""
    if not evidence.engine.is_sqlite:
        return 0.0
    of_others = [took for at, took in evidence.writes if since <= at and at - took <= to]
    return WRITES_TO_START * max(of_others, default=0.0)


WRITES_TO_START = 4
"""Transactions of a worker until a job begins on SQLite: its record, its lease, its marker, and
one of somebody else in the same process."""


def _idle_latency(evidence: Evidence) -> float:
    """Return how long a probe took before anything else was enqueued."""
    idle = [
        min(begin.at for begin in evidence.begins[name]) - evidence.committed[name]
        for name, work in evidence.works.items()
        if work.at < 0 and name in evidence.begins and name in evidence.committed
    ]
    return median(idle) if idle else 0.0


def no_more_starts_than_a_rate_permits(evidence: Evidence) -> Iterator[str]:
    """Whatever is done to workers and servers."""
    for key, starts in evidence.starts.items():
        if (most := most_within(starts, 1.0)) > RATE:
            yield f"{most} of {key} within a second"


def what_a_rate_permits_starts(evidence: Evidence) -> Iterator[str]:
    """While more jobs wait for a rate than workers hold ready, nearly all starts take place that it
    permits; not where something is done to workers or servers, or others than the plan take more of
    the processors than it does. On SQLite starts wait for the one that writes."""
    if evidence.engine.is_sqlite:
        return
    for key, starts in evidence.starts.items():
        names = [name for name in evidence.committed if evidence.works[name].key == key]
        waiting = _while(_waiting(evidence, names), lambda count: count > HELD_READY)
        waiting = [(since + SOON, to) for since, to in waiting]
        calm = [
            (since + CAUGHT_UP, to)
            for since, to in _without(
                waiting, [*_times_of_disturbance(evidence), *_times_lost(evidence)]
            )
            if to - since > CAUGHT_UP
        ]
        permitted = RATE * sum(to - since for since, to in calm)
        began = sum(since - CAUGHT_UP <= start.at <= to for since, to in calm for start in starts)
        if began < USED * permitted - 1:
            yield f"{began} of {key}, of {permitted:.1f} within {_told(calm)}"


USED = 0.95
"""Share of the permitted starts that take place."""
CAUGHT_UP = 0.5
"""Seconds of a rate whose starts may come late, and together."""
HELD_READY = 4 * RATE
"""Jobs with a rate that a worker may hold, as they start within the next four seconds."""


def no_more_run_at_once_than_have_slots(evidence: Evidence) -> Iterator[str]:
    """A worker that is frozen loses its slots; what it runs then is interrupted once it goes on."""
    runs = [run for run in _runs_in_slots(evidence, are_lost=True) if run[0] < run[1]]
    counts = [(sum(since <= at < to for since, to in runs), at) for at, _ in runs]
    most, at = max(counts, default=(0, 0.0))
    if most > SLOTS:
        yield f"{most} at {at:.2f}"


def a_free_slot_is_taken_soon(evidence: Evidence) -> Iterator[str]:
    """No slot is free for long while jobs wait for one. On SQLite it waits for who writes."""
    if evidence.engine.is_sqlite:
        return
    names = [name for name in evidence.committed if evidence.works[name].kind == "slotted"]
    waiting = _while(_waiting(evidence, names), lambda count: count > 0)
    runs = _runs_in_slots(evidence)
    changes = [(since, 1) for since, _ in runs] + [(to, -1) for _, to in runs]
    taken = _while(changes, lambda count: count >= SLOTS)
    idle = _idle_latency(evidence)
    for since, to in _without(waiting, [*taken, *_times_of_disturbance(evidence)]):
        slowness = 1 + SHARE * (_slowness(evidence, since, to) - 1)
        limit = SOON * slowness + SLOWER * idle + _wait_for_lock(evidence, since, since + SOON)
        if to - since > limit:
            yield f"free from {since:.2f} to {to:.2f}, more than {limit:.2f} s"


def _runs_in_slots(evidence: Evidence, *, are_lost: bool = False) -> list[tuple[float, float]]:
    """Return when each run of a job with slots began and ended.

    :param are_lost: runs of a worker that is frozen end at that moment, as their slots may.
    """
    runs = []
    for name, begins in evidence.begins.items():
        if evidence.works[name].kind != "slotted":
            continue
        for begin in begins:
            ends = [e.at for e in evidence.ends[name] if e.pid == begin.pid and e.at >= begin.at]
            end = min(ends, default=evidence.killed.get(begin.pid, begin.at))
            if are_lost:
                end = min([end, *_freezes_of(evidence, begin, end)])
            runs.append((begin.at, end))
    return runs


def _freezes_of(evidence: Evidence, begin: Begin, end: float) -> list[float]:
    """Return the moments at which a run's worker was frozen; that of its begin, where it was about
    to begin then."""
    return [
        max(since, begin.at)
        for pid, since, to in evidence.frozen
        if pid == begin.pid and since <= end and begin.at <= to + ABOUT_TO_BEGIN
    ]


ABOUT_TO_BEGIN = 0.5
"""Seconds after a thaw in which a handler is called that was about to be when it was frozen."""


def _waiting(evidence: Evidence, names: list[str]) -> list[tuple[float, int]]:
    """Return when the number of those that wait for their first run changes, and by how much."""
    changes = [(evidence.committed[name], 1) for name in names]
    begins = [evidence.begins[name] for name in names if name in evidence.begins]
    return changes + [(min(begin.at for begin in each), -1) for each in begins]


def _while(
    changes: list[tuple[float, int]], holds: Callable[[int], bool]
) -> list[tuple[float, float]]:
    """Return from when to when a condition holds of a number that changes at such moments."""
    found, count, since = [], 0, None
    for at, change in sorted(changes):
        count += change
        if holds(count) and since is None:
            since = at
        elif not holds(count) and since is not None:
            found.append((since, at))
            since = None
    return found


def _without(
    times: list[tuple[float, float]], others: list[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Return what is left of times without those of others."""
    for begin, end in others:
        times = [
            part
            for since, to in times
            for part in ((since, min(to, begin)), (max(since, end), to))
            if part[0] < part[1]
        ]
    return times


def _times_of_disturbance(evidence: Evidence) -> list[tuple[float, float]]:
    """Return from when to when something was done to workers or servers. One that is gone holds its
    slots, and the jobs that may start next, until its signs of life are missed."""
    harmless = () if evidence.engine.has_partitions else ("ready", "join")
    calm_after = CALM_AFTER + 3 * evidence.engine.heartbeat
    return [
        (since, to + calm_after)
        for since, to, what in evidence.disturbances
        if what not in harmless
    ]


def _times_lost(evidence: Evidence) -> list[tuple[float, float]]:
    """Return from when to when the machine was slower than busy processes of the plan make it for
    one that shares the processors with them, and its workers made up for that."""
    return [
        (at - AROUND, at + CALM_AFTER)
        for at, _ in evidence.paces
        if _slowness(evidence, at - AROUND, at + AROUND) > 1 + BUSY / evidence.processor_count
    ]


AROUND = 1.5
"""Seconds around a moment whose paces tell how slow the machine was then: one alone says little."""


def _told(times: list[tuple[float, float]]) -> str:
    return ", ".join(f"{since:.2f} to {to:.2f}" for since, to in times)


def steps_follow_one_another(evidence: Evidence) -> Iterator[str]:
    """No step of a workflow takes effect before those that it waits for."""
    places = {name: at for at, (_, name) in enumerate(evidence.entries)}
    of_flows: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for name, work in evidence.works.items():
        if name in places:
            of_flows[work.key][work.kind].append(places[name])
    for flow, steps in of_flows.items():
        for kind, before in (("step", "first_step"), ("last_step", "step")):
            if steps[kind] and max(steps[before], default=0) > min(steps[kind]):
                yield f"{flow}: {before} at {steps[before]}, {kind} at {steps[kind]}"


def leases_are_gone_or_expire(evidence: Evidence) -> Iterator[str]:
    """Nothing is held for ever, and nothing at all by those who left in order."""
    for lease in evidence.leases:
        if not lease.expires:
            yield f"{lease.name} has no end"
        elif not evidence.killed and not evidence.disturbances:
            yield f"{lease.name} is left, and nobody was killed"


def workers_end_in_order(evidence: Evidence) -> Iterator[str]:
    """Asked to stop, with nothing left to run, each exits with 0."""
    yield from evidence.workers_that_failed


INVARIANTS: tuple[Callable[[Evidence], Iterator[str]], ...] = (
    everything_ends,
    each_effect_is_there_once,
    each_end_has_one_row,
    each_end_is_told,
    each_key_keeps_its_order,
    records_for_others_are_published_once,
    dead_letters_are_published_once,
    what_a_lane_could_start_starts_soon,
    no_more_starts_than_a_rate_permits,
    what_a_rate_permits_starts,
    no_more_run_at_once_than_have_slots,
    a_free_slot_is_taken_soon,
    steps_follow_one_another,
    leases_are_gone_or_expire,
    workers_end_in_order,
)
