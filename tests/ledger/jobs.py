"""Handlers the tests run: each writes to the ledger, some misbehave on request."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

from django.db import transaction

from kjo_django import BatchItem, PermanentError, Retry, job, registry
from kjo_django.exceptions import RateLimitExceededError
from tests.ledger.models import Entry


@job(queue="ledger")
def write(job: str, note: str = "") -> None:
    """Add the job's one entry."""
    Entry.objects.create(job=job, note=note)


@job(queue="ledger")
def weigh(job: str, content: str) -> None:
    """Add the job's one entry, with the length of what it was given."""
    Entry.objects.create(job=job, note=str(len(content)))


@job(queue="ledger")
def list_modules(path: str) -> None:
    """Write the names of all modules that are imported into a file."""
    Path(path).write_text("\n".join(sorted(sys.modules)))


@job(queue="ledger", database_only=True)
def write_only(job: str, note: str = "") -> None:
    """Add the job's one entry, with no savepoint about it."""
    Entry.objects.create(job=job, note=note)


@job(queue="ledger", key="key")
def write_keyed(job: str, key: str, milliseconds: float = 0) -> None:
    """Add an entry in the order of the key."""
    if milliseconds:
        time.sleep(milliseconds / 1000)  # sleep: as long as the test wants it to take
    Entry.objects.create(job=job, note=key)


@job(queue="ledger")
def write_slowly(job: str, milliseconds: float = 5) -> None:
    """Add an entry, dawdling before and after."""
    time.sleep(milliseconds / 2000)  # sleep: dawdles before
    Entry.objects.create(job=job)
    time.sleep(milliseconds / 2000)  # sleep: and after


@job(queue="ledger", atomic=False)
def write_outside(job: str, milliseconds: float = 0) -> None:
    """Add an entry outside the pipeline's transaction."""
    time.sleep(milliseconds / 1000)  # sleep: as long as the test wants it to take
    Entry.objects.create(job=job)


@job(queue="ledger")
async def write_async(job: str) -> None:
    """Add an entry from a coroutine, within the transaction."""
    await Entry.objects.acreate(job=job)


@job(queue="ledger", atomic=False)
async def sleep_async(seconds: float) -> str:
    """Sleep on the event loop."""
    import asyncio

    await asyncio.sleep(seconds)
    return "slept"


@job(queue="ledger", atomic=False, takes_context=True)
async def sleep_async_by_attempt(context, seconds: list[float]) -> None:
    """Sleep on the event loop, in each attempt for a time of its own."""
    import asyncio

    await asyncio.sleep(seconds[context.attempt - 1])


@job(queue="ledger", atomic=False, max_attempts=1)
async def call_server(job: str, port: int) -> str:
    """Open a connection of its own, ask, and wait ten seconds for the answer."""
    import asyncio

    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{job}\n".encode())
        answer = await reader.readline()
    writer.close()
    return answer.decode().strip()


@job(queue="ledger", takes_context=True)
def write_attempt(context, job: str, fail_times: int = 0) -> dict:
    """Fail a number of times, having written something that must not stay; then succeed."""
    Entry.objects.create(job=job, note=f"attempt {context.attempt}")
    if context.attempt <= fail_times:
        raise RuntimeError(f"attempt {context.attempt} fails")
    return {"attempt": context.attempt, "key": context.idempotency_key}


@job(queue="ledger", max_attempts=2)
def always_fails(job: str, message: str = "always fails") -> None:
    """Write, then fail."""
    Entry.objects.create(job=job, note="must be rolled back")
    raise RuntimeError(message)


@job(queue="ledger")
def refuse(job: str) -> None:
    """Fail for good at once."""
    Entry.objects.create(job=job, note="must be rolled back")
    raise PermanentError("this will never work")


@job(queue="ledger", takes_context=True)
def ask_again(context, job: str, seconds: float = 0) -> None:
    """Ask for another attempt once."""
    if context.attempt == 1:
        raise Retry("not yet", delay=timedelta(seconds=seconds))
    Entry.objects.create(job=job, note=f"attempt {context.attempt}")


@job(queue="ledger", max_attempts=3)
def kill_worker(job: str) -> None:
    """Take the whole process down, as a crash in C code or the OOM killer would."""
    Entry.objects.create(job=job, note="must be rolled back")
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # sleep: until the signal has come


@job(queue="ledger", timeout=0.3, max_attempts=1)
def hang(job: str, seconds: float = 30) -> None:
    """Exceed the timeout."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:  # timed loop: a handler that never ends by itself
        time.sleep(0.01)  # sleep: may be interrupted between two


@job(queue="ledger", key="key", max_attempts=1)
def write_when_open(job: str, key: str, gate: str) -> None:
    """Meet a rate limit until the file ``gate`` is there; note each call beside it."""
    with Path(f"{gate}.calls").open("a") as calls:
        calls.write(f"{job}\n")
    if not Path(gate).exists():
        raise RateLimitExceededError("slow down")
    Entry.objects.create(job=job, note=key)


@job(queue="ledger")
def spawn(job: str, children: int) -> None:
    """Enqueue further jobs within the transaction."""
    for number in range(children):
        write.enqueue(job=f"{job}/{number}")
    Entry.objects.create(job=job)


@job(queue="ledger")
def no_op() -> None:
    """Do nothing."""


@job(queue="ledger", database_only=True)
def no_op_only() -> None:
    """Do nothing, and promise that it is nothing outside the database."""


@job(queue="ledger")
def give(value: object = None) -> object:
    """Return what was given."""
    return value


@job(queue="ledger", takes_context=True)
def write_and_add(context, job: str, steps: int) -> None:
    """Add an entry, and steps to the workflow."""
    for number in range(steps):
        context.workflow.add(write, job=f"{job}/{number}")
    Entry.objects.create(job=job)


@job(queue="ledger", takes_context=True)
def write_count(context, job: str) -> int:
    """Add an entry, and count the results of the steps before."""
    Entry.objects.create(job=job)
    return sum(1 for _ in context.workflow.results())


@job(queue="ledger", takes_context=True)
def wait_for(context, job: str, path: str) -> dict:
    """Say that it runs, by a file, and wait for the file that lets it go on; then add an entry."""
    _wait_for_file(path)
    Entry.objects.create(job=job, note=f"attempt {context.attempt}")
    return {"pid": os.getpid(), "attempt": context.attempt}


@job(queue="ledger", key="key")
def wait_for_keyed(job: str, key: str, path: str) -> None:
    """Add an entry in the order of the key, having waited as ``wait_for`` does."""
    _wait_for_file(path)
    Entry.objects.create(job=job, note=key)


@job(queue="ledger")
def write_and_signal(job: str, number: int) -> None:
    """Add an entry, and send this process a signal when that is committed, before its worker has
    done anything else."""
    Entry.objects.create(job=job)
    transaction.on_commit(partial(os.kill, os.getpid(), number))


@job(queue="ledger", batch=10)
def write_together(batch: list[BatchItem]) -> list[str]:
    """Add an entry for each of the batch, then wait as ``wait_for`` does where one asks for it."""
    Entry.objects.bulk_create([Entry(job=item.payload["job"]) for item in batch])
    for path in {item.payload["path"] for item in batch if item.payload.get("path")}:
        _wait_for_file(path)
    return [item.payload["job"] for item in batch]


@job(queue="ledger", takes_context=True, atomic=False)
def wait_outside(context, job: str, path: str) -> dict:
    """The same outside the pipeline's transaction."""
    _wait_for_file(path)
    Entry.objects.create(job=job, note=f"attempt {context.attempt}")
    return {"pid": os.getpid(), "attempt": context.attempt}


def _wait_for_file(path: str) -> None:
    """Touch ``path.<pid>``, then wait for ``path.go``, or ``path.<pid>.go`` for this process."""
    started = Path(f"{path}.{os.getpid()}")
    started.touch()
    while not (Path(f"{path}.go").exists() or Path(f"{started}.go").exists()):
        time.sleep(0.01)  # sleep: for as long as the test pleases, with no end of its own


@job(queue="ledger")
def fail_unless(job: str, mended: bool) -> None:
    """Fail for good, unless the payload was mended."""
    if not mended:
        raise PermanentError("the payload is not mended")
    Entry.objects.create(job=job)


@job(queue="ledger", atomic=False, max_attempts=3)
def write_wait_or_kill(job: str, path: str = "", kill: bool = False) -> None:
    """Add an entry at once, having waited as ``wait_outside`` does, or take the process down."""
    if kill:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # sleep: until the signal has come
    if path:
        _wait_for_file(path)
    Entry.objects.create(job=job)


# --- Steps of a workflow --------------------------------------------------------------------------


@job(queue="ledger")
def fetch_parts() -> None:
    """Add an entry; the first step."""
    Entry.objects.create(job="fetched")


@job(queue="ledger")
def load_part(part: int, fails: bool = False) -> int:
    """Add an entry, unless it fails; it does no more once there is an entry that says so."""
    if fails and not Entry.objects.filter(job="mended").exists():
        raise PermanentError("the part is torn")
    Entry.objects.create(job=f"part-{part}")
    return part


@job(queue="ledger")
def report_parts() -> None:
    """Add an entry; the last step."""
    Entry.objects.create(job="reported")


if unknown := os.environ.get("KJO_TEST_UNKNOWN"):
    # A worker of the release before: it does not have this handler yet.
    registry.unregister(unknown)

if "KJO_TEST_LIMITS" in os.environ:
    # Where any handler has a limit, each group is asked for it: only for tests of limits.
    from tests.ledger import limited  # noqa: F401
