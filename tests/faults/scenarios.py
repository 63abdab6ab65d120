"""What is done to the matrix: every kind of handler with every ending, each pattern, relay, replay,
bulk and stop. A scenario is written without a thought of faults: these come at each of its calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any
from zlib import crc32

from kjo_django import PermanentError, Queue, job, registry
from kjo_django.conf import get_settings
from kjo_django.enqueue import storing
from kjo_django.exceptions import RateLimitExceededError
from kjo_django.models import Job
from kjo_django.operations import jobs as operations
from kjo_django.runtime import get_transport
from tests.faults.process import Process
from tests.faults.world import World
from tests.ledger.models import Entry

QUEUE = "faults"
LEVELS = "faults-levels"
"""A queue with three levels of priority."""


@dataclass(frozen=True)
class Scenario:
    """:param act: what the first process does, and its worker; ends when that is idle.
    :param queues: what workers consume.
    :param ticks: whether workers store the jobs of schedules.
    :param stands: whether time passes only when the world says so: a permit must not run out
        because a machine is busy.
    """

    name: str
    act: Callable[[World, Process], None]
    queues: tuple[str, ...] = (QUEUE,)
    ticks: bool = False
    stands: bool = False


SCENARIOS: list[Scenario] = []


def scenario(
    name: str, *queues: str, ticks: bool = False, stands: bool = False
) -> Callable[[Any], Any]:
    def declare(act: Any) -> Any:
        SCENARIOS.append(Scenario(name, act, queues or (QUEUE,), ticks, stands))
        return act

    return declare


# --- Kinds of handlers ----------------------------------------------------------------------------


class Kinds:
    """Handlers of every kind, all doing as the job's ``ending`` says, and how each is enqueued."""

    def __init__(self, world: World) -> None:
        self.world = world

        def behave(name: str, ending: str) -> Exception | None:
            """Return what is to be raised at this call of the handler."""
            world.calls[name] += 1
            if ending == "stops-worker":
                world.on_stop()
            if ending == "dead" or (ending == "until-mended" and not world.is_mended):
                return PermanentError("for good")
            if world.calls[name] > 1:
                return None
            if ending == "retried":
                return RuntimeError("not yet")
            if ending == "paused":
                return RateLimitExceededError("slow down")
            return None

        def write(job: str, ending: str) -> None:
            Entry.objects.create(job=job)
            if error := behave(job, ending):
                raise error

        async def awrite(job: str, ending: str) -> None:
            await Entry.objects.acreate(job=job)
            if error := behave(job, ending):
                raise error

        def write_batch(batch: Any) -> None:
            from django.db import transaction

            for item in batch:
                if error := behave(item.payload["job"], item.payload["ending"]):
                    item.fail(error)
                else:
                    with transaction.atomic():
                        Entry.objects.create(job=item.payload["job"])

        common: dict[str, Any] = {"queue": QUEUE, "key": lambda job, ending: _key_of(job)}
        self.jobs: dict[str, Any] = {
            "atomic": job(name="faults.atomic", **common)(write),
            "database-only": job(name="faults.database_only", database_only=True, **common)(write),
            "outside": job(name="faults.outside", atomic=False, **common)(write),
            "async": job(name="faults.async", **common)(awrite),
            "coroutine": job(name="faults.coroutine", atomic=False, **common)(awrite),
            "batch": job(name="faults.batch", batch=10, **common)(write_batch),
            "batch-outside": job(name="faults.batch_out", batch=10, atomic=False, **common)(
                write_batch
            ),
        }
        self.jobs["levels"] = job(name="faults.levels", **common | {"queue": LEVELS})(write)
        self.queue = Queue("faults-queue")
        self.queue.handler(lambda job: write(job.payload.get("job", job.id), job.payload["ending"]))
        import_module("kjo_django.contrib.tasks").load_backends()
        self.tasks = import_module("tests.faults.tasks")
        self.tasks.behaviour[:] = [behave]
        self.behave = behave

    def enqueue(self, process: Process, kind: str, name: str, ending: str) -> Any:
        put = self.enqueuing(kind, name, ending)
        return self.world.enqueue(process, name, put, _key_of(name), kind in OUTSIDE)

    def enqueuing(self, kind: str, name: str, ending: str) -> Callable[[], Any]:
        """Return what enqueues a job of this kind."""
        if kind == "queue":
            return partial(self.queue.enqueue, name, {"ending": ending}, key=_key_of(name))
        if kind == "task":
            write = self.tasks.write.using(queue_name="tasks", key=_key_of(name) or None)
            return partial(write.enqueue, job=name, ending=ending)
        if kind == "levels":
            put = self.jobs[kind].using(priority=_priority_of(name))
            return partial(put.enqueue, job=name, ending=ending)
        return partial(self.jobs[kind].enqueue, job=name, ending=ending)


def _priority_of(name: str) -> int:
    """Return one of all levels; of jobs of a key the same, which keep their order."""
    return 60 if _key_of(name) else (-5, 0, 5, 60)[crc32(name.encode()) % 4]


def _key_of(name: str) -> str:
    return "k" if name.startswith("k") else ""


OUTSIDE = {"outside", "coroutine", "batch-outside"}
KINDS = [
    "atomic",
    "database-only",
    "outside",
    "async",
    "coroutine",
    "batch",
    "batch-outside",
    "queue",
    "task",
]
ENDINGS = ["completed", "retried", "dead", "cancelled", "duplicate", "paused", "mixed"]


def _queue_of(kind: str) -> str:
    return {"queue": "faults-queue", "task": "tasks", "levels": LEVELS}.get(kind, QUEUE)


def _act(kind: str, ending: str) -> Callable[[World, Process], None]:
    def act(world: World, process: Process) -> None:
        kinds: Kinds = world.kinds
        if ending == "mixed":
            jobs = [
                ("k1", "completed"),
                ("f2", "dead"),
                ("k3", "completed"),
                ("f4", "retried"),
                ("f5", "completed"),
            ]
        elif ending in ("cancelled", "duplicate"):
            jobs = [("k1", "completed"), ("k2", "completed"), ("f3", "completed")]
        else:
            jobs = [("k1", ending), ("k2", ending)]
        for name, how in jobs:
            kinds.enqueue(process, kind, name, how)
        if ending == "cancelled":
            process.ask(lambda: operations.cancel(Job.objects.filter(queue=_queue_of(kind))[1:2]))
        if ending == "duplicate":
            _publish_again(process, _queue_of(kind))
        process.work()
        if ending in ("retried", "paused", "mixed"):
            world.clock.advance(3)
            process.work()

    return act


@scenario("priority-levels", LEVELS)
def _levels(world: World, process: Process) -> None:
    kinds: Kinds = world.kinds
    for name, ending in (
        ("f1", "retried"),
        ("k2", "completed"),
        ("k3", "completed"),
        ("f4", "dead"),
        ("f5", "completed"),
    ):
        kinds.enqueue(process, "levels", name, ending)
    process.work()
    world.clock.advance(3)
    process.work()


def _publish_again(process: Process, queue: str) -> None:
    """Give the topic a second copy of the first job's record, as a relay does that could not note
    where the first went."""
    conf = get_settings().queue(queue)
    with process.unwatched():
        row = Job.objects.filter(queue=queue).order_by("id").first()
        if row is not None:
            get_transport(conf.transport).publish([storing.record_of(row, conf)])


for _kind in KINDS:
    for _ending in ENDINGS:
        scenario(f"{_kind}-{_ending}", _queue_of(_kind))(_act(_kind, _ending))


@scenario("unknown-handler")
def _unknown(world: World, process: Process) -> None:
    """Workers of the release before have the jobs first; then others take their place."""
    kinds: Kinds = world.kinds
    with process.unwatched():
        for kind, name in (("atomic", "f1"), ("outside", "f2"), ("atomic", "f3")):
            kinds.enqueue(process, kind, name, "completed")
    handlers = [registry.find(name) for name in ("faults.atomic", "faults.outside")]
    for handler in handlers:
        assert handler is not None
        registry.unregister(handler.name)
    try:
        process.work()
    finally:
        for handler in handlers:
            assert handler is not None
            registry.register(handler)
    world.clock.advance(6)
    process.work()
