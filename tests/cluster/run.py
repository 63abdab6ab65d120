"""One run: the faults of a seed, one after the other, under load; then everything is compared."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from django.db import connections

from tests.acceptance.engine import ALIAS
from tests.cluster.cluster import Cluster
from tests.cluster.faults import begin
from tests.cluster.history import Effect, Found, Recovery, Save, check, read, recovery
from tests.cluster.plan import Fault
from tests.cluster.web import KEYS

TWO = "two at once"
SURVIVED_WITHIN = 180.0
"""Seconds after the end of a fault until which every key must go on."""
COMPARED_WITHIN = 600.0
"""Seconds until which everything must have ended where a fault was not survived in time: the run
has failed already, and what was saved until then is compared all the same."""
EFFECTS = (
    "SELECT job, extract(epoch FROM pg_xact_commit_timestamp(xmin))::float8"
    " FROM ledger_entry ORDER BY id"
)


@dataclass(frozen=True, slots=True)
class Survived:
    """A fault that is over."""

    row: str
    """Of the table: its kind, or that there was another fault at the same time."""
    fault: Fault
    machine: str
    began_at: float
    ended_at: float
    whole_at: float


class Run:
    """Carries out a plan on a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.survived: list[Survived] = []
        self.complaints: list[str] = []

    def carry_out(self, rounds: Iterable[list[Fault]], *, until: float = float("inf")) -> None:
        """Let faults come and go, those of a round at the same time; end before the next round if
        the time is over, or if one was not survived in time, which is a complaint."""
        try:
            self._wait_until_whole(time.time(), "at first")
            for faults in rounds:
                if time.time() > until:
                    break
                self._carry_out(faults)
        except AssertionError as error:
            self.complaints.append(str(error))

    def _carry_out(self, faults: list[Fault]) -> None:
        began_at, under_way = time.time(), []
        names = []
        for fault in faults:
            self._cluster.run_for(fault.pause)
            if not under_way:
                began_at = time.time()
            machine, undo = begin(self._cluster, fault)
            under_way.append((fault, machine, undo))
            names.append(f"{fault} ({machine})")
        name = " and ".join(names)
        print(name, end="", flush=True, file=sys.stderr)
        for fault, _, undo in under_way:
            self._cluster.run_for(fault.seconds)
            undo()
        ended_at = time.time()
        self._wait_until_whole(ended_at, f"after {name}")
        whole_at = time.time()
        print(f", whole after {whole_at - began_at:.1f} s", flush=True, file=sys.stderr)
        kind = under_way[0][0].kind if len(under_way) == 1 else TWO
        for fault, machine, _ in under_way:
            self.survived.append(Survived(kind, fault, machine, began_at, ended_at, whole_at))

    def _wait_until_whole(self, since: float, when: str) -> None:
        """Wait until a job of each key has run that was saved after a moment, and until there is a
        standby again."""
        cluster = self._cluster

        def goes_on() -> bool:
            connections[ALIAS].close()
            saves = read(cluster.histories).values()
            new = {save.job: save.key for save in saves if save.invoked_at > since}
            done = cluster.engine.entries.filter(job__in=new).values_list("job", flat=True)
            keys = {new[job] for job in done}
            return len(keys) == len(cluster.webs) * KEYS and not cluster.pair.has_lost_one

        cluster.until(goes_on, f"Not every key goes on {when}", SURVIVED_WITHIN)

    def end(self) -> Report:
        """Let everything come to its end, and every process stop as it should."""
        cluster = self._cluster
        cluster.stop(cluster.webs)
        within = COMPARED_WITHIN if self.complaints else SURVIVED_WITHIN
        cluster.until(cluster.engine.is_settled, "Not everything was settled", within)
        cluster.stop([*cluster.workers, *cluster.relays])
        saves = read(cluster.histories)
        with connections[ALIAS].cursor() as cursor:
            cursor.execute(EFFECTS)
            effects = [Effect(*row) for row in cursor.fetchall()]
        failed = set(cluster.engine.failures.values_list("job__unique_id", flat=True))
        found = check(saves, effects, failed)
        letters = list(cluster.engine.dead_letters.values_list("reason", "error"))
        return Report(self, saves, effects, found, failed, cluster, letters)


class Report:
    """What a run has shown."""

    def __init__(
        self,
        run: Run,
        saves: dict[str, Save],
        effects: list[Effect],
        found: Found,
        failed: set[str],
        cluster: Cluster,
        letters: list[Any],
    ) -> None:
        self._run = run
        self._saves = saves
        self.found = found
        self._failed = failed
        self._cluster = cluster
        self._letters = letters
        committed = {effect.name: effect.committed_at for effect in effects}
        self._recoveries: list[tuple[Survived, Recovery]] = (
            [
                (each, recovery(saves.values(), committed, each.began_at, each.whole_at))
                for each in run.survived
            ]
            if not (found.lost or found.torn)
            else []
        )

    def complaints(self) -> list[str]:
        """Return what should not be, in words."""
        found = [
            f"{name}: {len(jobs)}, such as {jobs[:3]}"
            for name, jobs in asdict(self.found).items()
            if jobs
        ]
        found += self._run.complaints
        found += [f"a process ended: {end}" for end in self._cluster.ends]
        found += [f"a dead letter: {letter}" for letter in self._letters]
        return found

    def summary(self) -> dict[str, Any]:
        """Return everything as JSON knows it."""
        return {
            "saves": dict(Counter(save.outcome for save in self._saves.values())),
            **{name: len(jobs) for name, jobs in asdict(self.found).items()},
            "failed attempts of jobs": len(self._failed),
            "failovers of postgresql": self._cluster.failovers,
            "complaints": self.complaints(),
            "faults": [
                {
                    **asdict(survived.fault),
                    "row": survived.row,
                    "machine": survived.machine,
                    "began_at": survived.began_at,
                    "ended_at": survived.ended_at,
                    "whole_at": survived.whole_at,
                    **asdict(times),
                }
                for survived, times in self._recoveries
            ],
        }


def table(summaries: Iterable[dict[str, Any]]) -> str:
    """Return times to recover by kind of fault, as text."""
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for summary in summaries:
        for fault in summary["faults"]:
            rows[fault.get("row", fault["kind"])].append(fault)
    lines = [f"{'fault':<12} {'count':>5} {'median':>8} {'worst':>8} {'longest wait':>13}"]
    for row, faults in sorted(rows.items()):
        whole = [fault["until_whole"] for fault in faults]
        wait = max(fault["longest_wait"] for fault in faults)
        times = f"{statistics.median(whole):>6.1f} s {max(whole):>6.1f} s {wait:>11.1f} s"
        lines.append(f"{row:<12} {len(faults):>5} {times}")
    return "\n".join(lines)


def write(summary: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(summary, indent=1) + "\n")
