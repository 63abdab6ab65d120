"""Handlers with limits; the processes of their tests import them."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from kjo_django import job
from tests.ledger.counting import counted
from tests.ledger.models import Entry


def _note_moment(path: str, what: str) -> None:
    now = time.time()  # opening a file takes a while on a busy machine
    counted_from, counted_by = counted()
    with Path(path).open("a") as moments:
        moments.write(f"{now} {os.getpid()} {counted_from} {counted_by} {what}\n")


@job(queue="ledger", rate="5/s", atomic=False)
def start_rated(path: str) -> None:
    """Note when it starts."""
    _note_moment(path, "start")


@job(queue="ledger", rate="5/s")
def start_rated_in_transaction(path: str) -> None:
    """Note when it starts."""
    _note_moment(path, "start")


@job(queue="ledger", rate="30/s")
def write_often(path: str) -> None:
    """Note when it starts, and add an entry."""
    _note_moment(path, "often")
    Entry.objects.create(job=path)


@job(queue="ledger", rate="5/s")
def write_seldom(path: str) -> None:
    """Note when it starts, and add an entry."""
    _note_moment(path, "seldom")
    Entry.objects.create(job=path)


@job(queue="ledger")
def write_at_will(path: str) -> None:
    """Note when it starts, and add an entry; nothing limits it."""
    _note_moment(path, "at will")
    Entry.objects.create(job=path)


@job(queue="ledger", rate="1/h", atomic=False)
def start_rarely(path: str) -> None:
    """Note when it starts."""
    _note_moment(path, "start")


@job(queue="ledger", concurrency=3, concurrency_key="tenant", atomic=False)
def occupy_slot(tenant: str, path: str, seconds: float) -> None:
    """Note when it starts and ends, or is interrupted."""
    run = f"{tenant} {threading.get_ident()}"
    _note_moment(path, f"{run} start")
    try:
        end = time.monotonic() + seconds
        while time.monotonic() < end:  # timed loop: holds its slot for so long
            time.sleep(0.01)  # sleep: may be interrupted between two
    except BaseException:
        _note_moment(path, f"{run} interrupted")
        raise
    _note_moment(path, f"{run} end")
