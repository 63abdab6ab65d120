"""A web application under way: it enqueues jobs of every kind, and remembers what was promised."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from django.db import DatabaseError, InterfaceError, connections, transaction

from kjo_django.exceptions import KjoError
from tests.acceptance.engine import ALIAS
from tests.ledger import jobs

MANY = 100
"""Attempts of a job under fire: being killed is an attempt, and here it is not the job's fault."""


def _write(name: str) -> set[str]:
    jobs.write.using(id=name, max_attempts=MANY).enqueue(job=name)
    return {name}


def _in_transaction(name: str) -> set[str]:
    names = {f"{name}/{number}" for number in range(3)}
    with transaction.atomic(using=ALIAS):
        for each in sorted(names):
            jobs.write.using(id=each, max_attempts=MANY).enqueue(job=each)
    return names


def _slow(name: str) -> set[str]:
    jobs.write_slowly.using(id=name, max_attempts=MANY).enqueue(job=name, milliseconds=20)
    return {name}


def _long(name: str) -> set[str]:
    jobs.write_slowly.using(id=name, max_attempts=MANY).enqueue(job=name, milliseconds=600)
    return {name}


def _keyed(name: str) -> set[str]:
    key = f"key-{len(name) + ord(name[-1]) % 5}"
    jobs.write_keyed.using(id=name, max_attempts=MANY).enqueue(job=name, key=key)
    return {name}


def _spawn(name: str) -> set[str]:
    jobs.spawn.using(id=name, max_attempts=MANY).enqueue(job=name, children=2)
    return {name, f"{name}/0", f"{name}/1"}


def _failing(name: str) -> set[str]:
    jobs.write_attempt.using(id=name, max_attempts=MANY).enqueue(job=name, fail_times=1)
    return {name}


def _async(name: str) -> set[str]:
    jobs.write_async.using(id=name, max_attempts=MANY).enqueue(job=name)
    return {name}


def _only(name: str) -> set[str]:
    jobs.write_only.using(id=name, max_attempts=MANY).enqueue(job=name)
    return {name}


def _together(name: str) -> set[str]:
    names = {f"{name}/{number}" for number in range(3)}
    with transaction.atomic(using=ALIAS):
        for each in sorted(names):
            jobs.write_together.using(id=each, max_attempts=MANY).enqueue(job=each)
    return names


KINDS: list[Callable[[str], set[str]]] = [
    _write,
    _keyed,
    _write,
    _slow,
    _write,
    _spawn,
    _keyed,
    _failing,
    _write,
    _async,
    _in_transaction,
    _together,
    _only,
]


class Load:
    """Enqueues until left. Its enqueues are repeated, under their unique ids, until one returns.

    :param rate: jobs a second, about.
    :param long: let some jobs take long, so that there is something to interrupt at any moment. Not
        for SQLite, where nobody else writes while they run.
    :param prefix: what the names of its jobs begin with.
    """

    def __init__(self, rate: float = 100.0, *, long: bool = False, prefix: str = "job") -> None:
        self._pause = 1 / rate
        self._prefix = prefix
        self._kinds = [*KINDS, *KINDS, _long] if long else KINDS
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load")
        self._unexpected: BaseException | None = None
        self.expected: set[str] = set()
        """Jobs that were promised to run."""
        self.unsure: set[str] = set()
        """Jobs whose enqueue raised and was not repeated, at the end of the load."""
        self.refusals = 0

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Enqueue nothing more."""
        self._stopping.set()
        self._thread.join()
        if self._unexpected is not None:
            raise self._unexpected

    def _run(self) -> None:
        number = 0
        try:
            while not self._stopping.is_set():
                self._enqueue(self._kinds[number % len(self._kinds)], f"{self._prefix}-{number}")
                number += 1
                time.sleep(self._pause)  # sleep: the pace of the load, nothing waits for it
        except BaseException as error:
            self._unexpected = error
        finally:
            connections.close_all()

    def _enqueue(self, kind: Callable[[str], set[str]], name: str) -> None:
        while True:
            try:
                self.expected |= kind(name)
                return
            except (DatabaseError, InterfaceError, KjoError):
                self.refusals += 1
                connections[ALIAS].close()
                if self._stopping.wait(0.1):
                    self.unsure |= {name, f"{name}/0", f"{name}/1", f"{name}/2"}
                    return
