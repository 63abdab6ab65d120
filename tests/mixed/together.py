"""A mixed load in one process: workers on threads, the memory transport, a SQLite file.

python -m tests.mixed.together SEED ENGINE PHASES

Nothing can be killed here. Instead the transport refuses, and statements fail, for a while.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.mixed.plan import Move, Plan, draw
from tests.mixed.trace import FILE, note
from tests.waiting import PATIENCE

END = 90.0
FAILING = 0.02
"""Share of the statements that fail while the database is broken."""
LANES = 6


class Together:
    """Carries out a plan; ends when everything has come to its end, or the time is over."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._random = random.Random(f"{plan.seed} together")
        self._workers: list[tuple[Any, threading.Thread]] = []
        self._is_broken = threading.Event()
        self._leaving: list[threading.Thread] = []

    def run(self) -> int:
        """Return how many workers did not end in order."""
        from django.db.backends.signals import connection_created

        from kjo_django.runtime import get_transport

        connection_created.connect(self._wrap)
        self._transport: Any = get_transport()
        for _ in range(2):
            self._join()
        Path(f"{os.environ[FILE]}.ready").touch()
        self._carry_out()
        for worker, _ in self._workers:
            worker.stop()
        threads = [*self._leaving, *(thread for _, thread in self._workers)]
        for thread in threads:
            thread.join(PATIENCE)
        self._note_topics()
        return sum(thread.is_alive() for thread in threads)

    def _carry_out(self) -> None:
        from tests.mixed.application import begin

        application = begin(self._plan)
        moves = threading.Thread(target=self._move, args=[application.start])
        moves.start()
        application.carry_out()
        moves.join()
        deadline, fewest = time.monotonic() + END, sys.maxsize
        in_a_row = 0
        while in_a_row < 2 and time.monotonic() < deadline:  # timed loop: put off by each end
            time.sleep(0.2)  # sleep: until the next look
            count = self._open_count()
            in_a_row = 0 if count else in_a_row + 1
            if count < fewest:
                deadline, fewest = time.monotonic() + END, count
        note("enqueued")

    def _open_count(self) -> int:
        """Return how many jobs and messages have not come to their ends."""
        from kjo_django.models import Job
        from kjo_django.states import OPEN

        return Job.objects.filter(state__in=OPEN).count() + sum(self.lag().values())

    def lag(self) -> dict[Any, int]:
        from tests.mixed import names

        run = os.environ[names.RUN]
        lag: dict[Any, int] = self._transport.lag(names.consumed_topics(run), names.group(run))
        return lag

    # --- Moves ------------------------------------------------------------------------------------

    def _move(self, start: float) -> None:
        for move in self._plan.moves:
            if move.what == "busy":
                continue  # done by others
            time.sleep(max(0.0, start + move.at - time.time()))  # sleep: until the plan says
            note("disturb", f"{move.what}-{move.at}")
            getattr(self, f"_do_{move.what}")(move)
            note("disturbed", f"{move.what}-{move.at}")

    def _join(self) -> None:
        from kjo_django.worker import Worker

        worker = Worker(concurrency=LANES, owns_process=False)
        thread = threading.Thread(target=worker.run)
        thread.start()
        self._workers.append((worker, thread))

    def _do_join(self, move: Move) -> None:
        self._join()

    def _do_leave(self, move: Move) -> None:
        self._join()
        worker, thread = self._workers.pop(0)
        worker.stop()
        self._leaving.append(thread)
        thread.join(PATIENCE)

    def _do_refuse(self, move: Move) -> None:
        self._transport.fail("the broker is away")
        time.sleep(move.seconds)  # sleep: as long as the plan says
        self._transport.fail(None)

    def _do_break_database(self, move: Move) -> None:
        self._is_broken.set()
        time.sleep(move.seconds)  # sleep: as long as the plan says
        self._is_broken.clear()

    def _wrap(self, connection: Any, **_: Any) -> None:
        connection.execute_wrappers.append(self._execute)

    def _execute(
        self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any
    ) -> Any:
        from django.db import OperationalError

        is_workers = threading.current_thread().name.startswith("kjo-")
        if is_workers and self._is_broken.is_set() and self._random.random() < FAILING:
            raise OperationalError("the database is broken for a while")
        return execute(sql, params, many, context)

    # --- Afterwards -------------------------------------------------------------------------------

    def _note_topics(self) -> None:
        """Note what the topics for others hold, since they end with this process."""
        from tests.mixed import names
        from tests.mixed.execution import published_at
        from tests.mixed.trace import identity_in

        run = os.environ[names.RUN]
        for topic in names.topics_of_others(run):
            word = "record" if topic == names.topic("others", run) else "dead_record"
            for record in self._transport.records(topic):
                note(word, identity_in(record.value), published_at(record))
        for place, count in self.lag().items():
            if count:
                note("unread", place, count)


def main(seed: str, engine: str, phases: str) -> int:
    from tests.mixed.manage import set_up

    set_up()
    return Together(draw(int(seed), engine, int(phases))).run()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
