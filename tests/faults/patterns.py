"""Scenarios of the patterns (events, KDLQ, streams, items), of the relay, replay, bulk and stop."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from django.core.management import call_command
from django.db import OperationalError, connection, transaction

from kjo_django import (
    BaseEvent,
    ModelConsumer,
    ModelProducer,
    PermanentError,
    event_handler,
    job,
    publish_event,
)
from kjo_django.models import DeadLetter, Job
from kjo_django.operations import bulk, dead_letters
from kjo_django.operations import jobs as operations
from kjo_django.patterns.kdlq import ProcessingStatus, kdlq_handler
from kjo_django.patterns.streams import AbstractStreamConsumer, AbstractStreamProducer
from kjo_django.transports.base import Record
from tests.faults.process import Process
from tests.faults.scenarios import QUEUE, Kinds, scenario
from tests.faults.world import World
from tests.items.models import Item
from tests.ledger.models import Entry

REFUSED = "deadlock detected"
MANY = 22
"""Jobs of one call, which PostgreSQL takes by COPY."""
EVENTS, KDLQ, STREAM, ITEMS = "faults-events", "faults-kdlq", "faults-stream", "faults-items"


class Patterns:
    """Producers and consumers of the patterns, doing as the message's ``ending`` says."""

    def __init__(self, world: World, kinds: Kinds) -> None:
        behave = kinds.behave

        @event_handler("WRITE", topic=EVENTS, max_attempts=5)
        def on_event(event: BaseEvent) -> None:
            Entry.objects.create(job=event.data["job"])
            if error := behave(event.data["job"], event.data["ending"]):
                raise error

        @kdlq_handler("faults", topic=KDLQ, max_attempts=5)
        def process_record(record: Record) -> ProcessingStatus:
            name, _, ending = (record.value or b"").decode().partition("/")
            Entry.objects.create(job=name)
            error = behave(name, ending)
            if ending == "alone" and connection.run_on_commit:  # of another, before it
                raise OperationalError(REFUSED)
            if isinstance(error, RuntimeError):
                return ProcessingStatus.MUST_BE_REDELIVERED
            if error:
                raise error
            return ProcessingStatus.OK

        class Tasks(AbstractStreamProducer[dict]):
            task_display_name = "writing"
            stream_key = STREAM

            def build_message(self, payload: Any) -> Any:
                return payload

            def payload_identifier(self, payload: Any) -> str:
                return str(payload["job"])

            def on_send_failed(self, payload: Any, error: str) -> None:
                world.unsent.append(payload["job"])

        class TaskConsumer(AbstractStreamConsumer[dict]):
            task_display_name = "writing"
            stream_key = STREAM
            group_name = "faults"

            def parse_payload(self, fields: Any) -> Any:
                return fields

            def payload_identifier(self, payload: Any) -> str:
                return str(payload["job"])

            def mark_processing(self, payload: Any) -> None: ...

            def process_business(self, payload: Any) -> None:
                if error := behave(payload["job"], payload["ending"]):
                    raise error
                Entry.objects.create(job=payload["job"])

            def mark_completed(self, payload: Any) -> None: ...

            def mark_failed(self, payload: Any, error: str) -> None: ...

        class Items(ModelProducer):
            model = Item
            queue = ITEMS
            hash_fields = ("email", "body")

        class ItemConsumer(ModelConsumer):
            topic = ITEMS
            consumer_group = ITEMS
            key_prefix = "FAULTS"
            model = Item

            def process(self, message: Any) -> None:
                name, _, ending = message["data"]["body"].partition("/")
                Entry.objects.create(job=name)
                if error := behave(name, ending):
                    raise error

        @job(name="faults.once_mended", queue=QUEUE)
        def write_once_mended(job: str) -> None:
            """Fail for good until the world is mended."""
            Entry.objects.create(job=job)
            if not world.is_mended:
                raise PermanentError("not mended")

        @job(name="faults.spawn", queue=QUEUE, max_attempts=5)
        def spawn(job: str, children: list[str], ending: str) -> None:
            payloads = [{"job": child, "ending": "completed"} for child in children]
            kinds.jobs["atomic"].enqueue_many(payloads)
            Entry.objects.create(job=job)
            if error := behave(job, ending):
                raise error

        @job(name="faults.again", queue=QUEUE, debounce=timedelta(seconds=4), unique_by=())
        def write_and_call_again(job: str, times: int = 0) -> None:
            Entry.objects.create(job=job)
            if times:
                write_and_call_again.enqueue(job=f"{job}-again", times=times - 1)

        @job(name="faults.once", queue=QUEUE)
        def write_once(job: str) -> None:
            Entry.objects.create(job=job)

        self.again, self.once = write_and_call_again, write_once
        self.tasks, self.items = Tasks(), Items
        self.once_mended, self.spawn = write_once_mended, spawn
        self.consumers = (on_event, process_record, TaskConsumer, ItemConsumer)


def _jobs(ending: str) -> list[tuple[str, str]]:
    if ending == "mixed":
        return [("f1", "completed"), ("f2", "dead"), ("f3", "retried"), ("f4", "completed")]
    return [("f1", ending), ("f2", ending)]


def _work(world: World, process: Process, ending: str) -> None:
    process.work()
    if ending in ("retried", "paused", "mixed"):
        for seconds in (5, 70):
            world.clock.advance(seconds)
            process.work()


def _event(ending: str) -> Any:
    def act(world: World, process: Process) -> None:
        for name, how in _jobs(ending):
            data = {"job": name, "ending": how, "userId": name}
            event = BaseEvent(type="WRITE", source="faults", data=data)
            world.enqueue(process, name, partial(publish_event, EVENTS, event))
        _work(world, process, ending)

    return act


def _kdlq(ending: str) -> Any:
    def act(world: World, process: Process) -> None:
        for name, how in _jobs(ending):
            world.publish(KDLQ, f"{name}/{how}".encode(), name.encode())
            world.promised.append(name)
        _work(world, process, ending)

    return act


def _kdlq_beside_others(world: World, process: Process) -> None:
    """Records that the database refuses where another one has run in their transaction before. The
    first of its kind is alone."""
    world.never = REFUSED
    for name in ("f1", "f2", "f3", "f4"):
        world.publish(KDLQ, f"{name}/alone".encode())
        world.promised.append(name)
    _work(world, process, "alone")


def _stream(ending: str) -> Any:
    def act(world: World, process: Process) -> None:
        for name, how in _jobs(ending):
            send = partial(world.patterns.tasks.send_task, {"job": name, "ending": how})
            world.enqueue(process, name, send, many=True)
        _work(world, process, ending)

    return act


def _item(ending: str) -> Any:
    def act(world: World, process: Process) -> None:
        with process.unwatched():
            for name, how in _jobs(ending):
                Item.objects.create(body=f"{name}/{how}")
                world.promised.append(name)

        def produce() -> Any:
            return world.patterns.items().produce_messages({"state": "PENDING"}, 10)

        world.recovering = produce
        process.ask(produce)
        _work(world, process, ending)

    return act


for _ending in ("completed", "retried", "dead", "paused", "mixed"):
    scenario(f"event-{_ending}", EVENTS, f"{EVENTS}-retry")(_event(_ending))
    scenario(f"stream-{_ending}", STREAM)(_stream(_ending))
for _ending in ("completed", "retried", "dead", "mixed"):
    scenario(f"kdlq-{_ending}", KDLQ, f"{KDLQ}-redelivery", f"{KDLQ}-retry")(_kdlq(_ending))
    scenario(f"item-{_ending}", ITEMS)(_item(_ending))
scenario("kdlq-fails-beside-others", KDLQ, f"{KDLQ}-redelivery", f"{KDLQ}-retry")(
    _kdlq_beside_others
)


# --- The relay ------------------------------------------------------------------------------------


@scenario("relay-records-for-others")
def relay_others(world: World, process: Process) -> None:
    for name in ("r1", "r2"):
        world.tell_others(process, name)
    process.work()


@scenario("relay-once")
def relay_once(world: World, process: Process) -> None:
    for name in ("r1", "r2"):
        world.tell_others(process, name)
    world.relays_once = True
    process.ask(lambda: call_command("kjo_produce", "--once", verbosity=0, stdout=world.output))
    process.work()


@scenario("relay-refused-for-good")
def relay_refused(world: World, process: Process) -> None:
    kinds = world.kinds
    kinds.enqueue(process, "atomic", "f1", "completed")
    kinds.enqueue(process, "atomic", "too-large", "completed")
    kinds.enqueue(process, "atomic", "f3", "completed")
    process.work()


# --- Enqueuing ------------------------------------------------------------------------------------


@scenario("enqueue-many")
def enqueue_many(world: World, process: Process) -> None:
    payloads = [{"job": f"k{number}", "ending": "completed"} for number in range(MANY)]
    names = [payload["job"] for payload in payloads]
    world.keys["k"] = names
    if process.ask(lambda: world.kinds.jobs["atomic"].enqueue_many(payloads)) is not None:
        world.promised += names
    process.work()


@scenario("enqueue-rolled-back")
def rolled_back(world: World, process: Process) -> None:
    def undo() -> None:
        with transaction.atomic():
            world.kinds.jobs["atomic"].enqueue(job="gone", ending="completed")
            raise ValueError("the request fails")

    world.withdrawn.add("gone")
    process.ask(undo)
    world.kinds.enqueue(process, "atomic", "f1", "completed")
    process.work()


@scenario("enqueue-unique", "faults-queue")
def unique(world: World, process: Process) -> None:
    for _ in range(2):
        world.kinds.enqueue(process, "queue", "f1", "completed")
    process.work()
    world.kinds.enqueue(process, "queue", "f1", "completed")
    process.work()


@scenario("enqueue-delayed")
def delayed(world: World, process: Process) -> None:
    later = world.kinds.jobs["atomic"].using(delay=timedelta(seconds=4))
    world.enqueue(process, "later", partial(later.enqueue, job="later", ending="completed"))
    process.work()
    world.clock.advance(5)
    process.work()


# --- Unique windows -------------------------------------------------------------------------------


def _meeting(
    world: World,
    process: Process,
    definition: Any,
    *names: str,
    after: str = "",
    between: Callable[[], None] = lambda: None,
) -> None:
    """Enqueue jobs of which each may meet the one before; note what the answers promise.

    :param after: the job that the first may meet.
    :param between: done before each but the first.
    """
    for before, name in zip((after, *names), names, strict=False):
        if name != names[0]:
            between()
        # Replaced by a request whose answer is lost, the one before has no effect.
        was_promised = before in world.promised
        if was_promised:
            world.promised.remove(before)
        answer = world.enqueue(process, name, partial(definition.enqueue, job=name))
        if answer is None:
            continue
        if answer.answer == "replaced":
            world.withdrawn.add(before)
            world.promised.append(name)
        elif was_promised:
            world.promised.append(before)
        if answer.answer in ("duplicate", "completed"):
            world.withdrawn.add(name)


def _windows(world: World) -> Any:
    return world.patterns.once.using(unique_for=timedelta(seconds=60), unique_by=())


@scenario("unique-kept")
def kept_in_window(world: World, process: Process) -> None:
    _meeting(world, process, _windows(world), "u1", "u2")
    process.work()
    _meeting(world, process, _windows(world), "u3", after="u2")
    world.clock.advance(61)
    _meeting(world, process, _windows(world), "u4", after="u3")
    process.work()


@scenario("unique-replaced")
def replaced_in_window(world: World, process: Process) -> None:
    _meeting(world, process, _windows(world).using(on_conflict="replace"), "u1", "u2", "u3")
    process.work()


@scenario("debounce-replaced")
def debounced(world: World, process: Process) -> None:
    _meeting(world, process, world.patterns.again, "d1", "d2")
    process.work()
    world.clock.advance(5)
    process.work()
    _meeting(world, process, world.patterns.again, "d3", after="d2")
    world.clock.advance(5)
    process.work()


@scenario("debounce-published")
def debounced_when_published(world: World, process: Process) -> None:
    """The message with the older payload has been read already."""

    def publish_and_poll() -> None:
        world.clock.advance(5)
        process._step(process._relay)
        for poller in process.worker.pollers:
            process._step(partial(process._poll, poller))

    _meeting(world, process, world.patterns.again, "d1", "d2", between=publish_and_poll)
    process.work()
    world.clock.advance(5)
    process.work()


@scenario("debounce-within-the-job")
def debounced_within(world: World, process: Process) -> None:
    put = partial(world.patterns.again.enqueue, job="a", times=2)
    world.enqueue(process, "a", put)
    if "a" in world.promised:
        world.promised += ["a-again", "a-again-again"]
    for _ in range(3):
        world.clock.advance(5)
        process.work()


def _spawning(world: World, process: Process, name: str, children: int, ending: str) -> None:
    names = [f"{name}-child-{number}" for number in range(children)]
    world.children[name] = names
    spawn = partial(world.patterns.spawn.enqueue, job=name, children=names, ending=ending)
    world.enqueue(process, name, spawn)


@scenario("enqueue-within-a-job")
def spawning(world: World, process: Process) -> None:
    _spawning(world, process, "parent", 1, "completed")
    process.work()


@scenario("enqueue-many-within-jobs")
def spawning_many(world: World, process: Process) -> None:
    """So many that PostgreSQL takes them by COPY, as the first thing that their handlers do. The
    first of a kind runs alone, those after it share a transaction."""
    _spawning(world, process, "f0", 1, "completed")
    process.work()
    for name, ending in (("f1", "retried"), ("f2", "completed")):
        _spawning(world, process, name, MANY, ending)
    _work(world, process, "retried")


# --- Operations -----------------------------------------------------------------------------------


def _two_dead(world: World, process: Process) -> None:
    for name in ("f1", "f2"):
        world.enqueue(process, name, partial(world.patterns.once_mended.enqueue, job=name))
    process.work()
    world.is_mended = True


@scenario("replay")
def replay(world: World, process: Process) -> None:
    with process.unwatched():
        _two_dead(world, process)
    process.ask(lambda: dead_letters.replay(dead_letters.DeadLetterFilter(), actor="somebody"))
    process.work()


@scenario("replay-of-others")
def replay_others(world: World, process: Process) -> None:
    """Messages that nobody enqueued here are published again."""
    with process.unwatched():
        for name in ("f1", "f2", "f3", "f4"):
            id, type = f"other-{name}".encode(), b"faults.once_mended"
            value = json.dumps({"job": name}).encode()
            world.publish(QUEUE, value, name.encode(), kjo_id=id, kjo_type=type)
            world.promised.append(name)
        process.work()
    world.is_mended = True
    process.ask(lambda: dead_letters.replay(dead_letters.DeadLetterFilter(), actor="somebody"))
    process.work()


@scenario("replay-of-an-earlier-generation", "faults-queue")
def replay_old(world: World, process: Process) -> None:
    queue = world.kinds.queue
    with process.unwatched():
        for name in ("old", "new"):
            payload = {"job": name, "ending": "until-mended"}
            world.enqueue(process, name, partial(queue.enqueue, "u1", payload, result_ttl=1000))
            process.work()
            world.clock.advance(2)
    world.is_mended = True
    world.withdrawn.add("new")
    letter = DeadLetter.objects.order_by("id").first()
    if letter is not None:
        chosen = dead_letters.DeadLetterFilter(ids=[letter.pk])
        process.ask(lambda: dead_letters.replay(chosen, actor="somebody"))
    process.work()


@scenario("requeue")
def requeue(world: World, process: Process) -> None:
    with process.unwatched():
        _two_dead(world, process)
    process.ask(lambda: operations.requeue(Job.objects.filter(queue=QUEUE)))
    process.work()


@scenario("bulk-replay")
def bulk_replay(world: World, process: Process) -> None:
    with process.unwatched():
        _two_dead(world, process)
    every = dead_letters.DeadLetterFilter()
    process.ask(lambda: bulk.start_bulk("replay_letters", every, actor="operator"))
    process.work()


@scenario("bulk-discard")
def bulk_discard(world: World, process: Process) -> None:
    with process.unwatched():
        _two_dead(world, process)
    every = dead_letters.DeadLetterFilter()
    world.may_discard = True
    process.ask(lambda: bulk.start_bulk("discard_letters", every, actor="operator", note="old"))
    process.work()


# --- Stop -----------------------------------------------------------------------------------------


def _stop(kind: str) -> Any:
    def act(world: World, process: Process) -> None:
        for name in ("k1", "k2", "f3"):
            world.kinds.enqueue(
                process, kind, name, "stops-worker" if name == "k1" else "completed"
            )
        world.on_stop = process.worker._stopping.set
        process.work()
        process.stop()

    return act


for _kind in ("atomic", "outside", "coroutine", "batch"):
    scenario(f"stop-{_kind}")(_stop(_kind))
