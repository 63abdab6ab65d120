"""A web process: it saves orders, each with a job of a key, and writes down what it was told.

python -m tests.cluster.web NAME RATE HISTORY
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

import django

from tests.acceptance.manage import die_with_parent

KEYS = 8
MANY = 1000
"""Attempts of a job under fire: an outage may be one, and here it is not the job's fault."""


def order(job: str) -> str:
    """Return the name of the row that is stored with a job."""
    return f"order of {job}"


class Web:
    """Saves, one after the other; a save whose outcome is not known is not repeated."""

    def __init__(self, name: str, rate: float, history: TextIO) -> None:
        self._name = name
        self._pause = 1 / rate
        self._history = history
        self.stopping = threading.Event()

    def run(self) -> None:
        """Save until told to stop."""
        number = 0
        while not self.stopping.wait(self._pause):
            self._save(f"{self._name}-{number:07}", f"{self._name}-key{number % KEYS}")
            number += 1

    def _save(self, job: str, key: str) -> None:
        from django.db import DatabaseError, InterfaceError, connection, transaction

        from kjo_django.exceptions import KjoError
        from tests.ledger.jobs import write_keyed
        from tests.ledger.models import Entry

        self._note("invoke", job, key)
        is_committing = False
        try:
            with transaction.atomic():
                Entry.objects.create(job=order(job))
                write_keyed.using(id=job, max_attempts=MANY).enqueue(job=job, key=key)
                is_committing = True
        except (DatabaseError, InterfaceError, KjoError) as error:
            # Whether a COMMIT without an answer took place is not known.
            self._note("info" if is_committing else "fail", job, key, error)
            connection.close()
        else:
            self._note("ok", job, key)

    def _note(self, what: str, job: str, key: str, error: Exception | None = None) -> None:
        facts = {"at": time.time(), "type": what, "job": job, "key": key}
        if error is not None:
            facts["error"] = f"{type(error).__name__}: {error}"[:200]
        self._history.write(json.dumps(facts) + "\n")
        self._history.flush()


if __name__ == "__main__":
    die_with_parent()
    django.setup()
    name, rate, path = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])
    with path.open("a") as history:
        web = Web(name, rate, history)
        signal.signal(signal.SIGTERM, lambda *_: web.stopping.set())
        web.run()
