"""The public classes and functions that a page of the reference describes beside those of jobs and
workflows, by the block of the page; `tests/reference.py` writes the blocks.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from tests import docstrings

BLOCKS: dict[str, tuple[str, ...]] = {
    "producer classes": (
        "kjo_django AbstractProducer ModelProducer",
        "kjo_django.patterns.items.producer ProduceResult",
    ),
    "consumer classes": ("kjo_django AbstractConsumer ModelConsumer",),
    "stream classes": ("kjo_django AbstractStreamProducer AbstractStreamConsumer",),
    "event classes": (
        "kjo_django publish_event",
        "kjo_django.patterns.events.event apublish_event",
        "kjo_django event_handler BaseEvent",
        "kjo_django.patterns.events.event EventMetadata PublishedEvent",
        "kjo_django EventIdempotencyService",
        "kjo_django.patterns.events.idempotency ProcessOutcome",
    ),
    "kdlq classes": (
        "kjo_django.kdlq kdlq_handler DlqConfig ProcessingStatus KDLQMessageConsumer Status "
        "Ordering KDLQMessageLifecycleListener",
    ),
    "queue classes": (
        "kjo_django.queue Queue EnqueueResult MessageStatus QueueJob AfterExecution CancelResult "
        "RequeueResult UpdateTtlResult",
    ),
    "testing functions": (
        "kjo_django.testing all_enqueued assert_enqueued refute_enqueued perform run_job drain "
        "Drained DrainedRun immediate isolated",
    ),
}
"""By the name of a block: a module and what is described of it, in the order of the page."""
CONSTRUCTED = {
    *("AbstractProducer", "BaseEvent", "EventMetadata", "EventIdempotencyService", "DlqConfig"),
    *("KDLQMessageConsumer", "Queue", "immediate"),
}
"""The classes that users call with arguments."""
OPTIONS = {
    "AbstractProducer": ("kjo_django.patterns.items.options ProducerOptions", "of producers"),
    "AbstractConsumer": ("kjo_django.patterns.items.consumer ConsumerOptions", "of consumers"),
}
"""By the name of a class: its options, which are attributes of it, and the heading of their table.
"""


def described(block: str) -> list[Any]:
    """Return the classes and functions of a block."""
    found = []
    for line in BLOCKS[block]:
        found += imported(line)
    return found


def imported(line: str) -> list[Any]:
    """Return what a module and names of it name."""
    module, *names = line.split()
    return [getattr(import_module(module), name) for name in names]


def lines(block: str, table: Callable[..., Iterator[str]]) -> Iterator[str]:
    """Yield what a block says."""
    before: list[type[Any]] = []
    for one in described(block):
        if isinstance(one, type):
            base = next((each for each in one.__mro__[1:] if each in before), None)
            is_constructed = one.__name__ in CONSTRUCTED
            yield from docstrings.class_lines(
                one, table, base, options=options_of(one), is_constructed=is_constructed
            )
            before.append(one)
        else:
            yield f"## {one.__name__}()"
            yield ""
            yield from docstrings.function_lines(one.__name__, one)


def options_of(kind: type[Any]) -> tuple[str, tuple[str, ...]] | None:
    """Return the heading of the table that describes a class's options, and their names."""
    if kind.__name__ not in OPTIONS:
        return None
    place, heading = OPTIONS[kind.__name__]
    (options,) = imported(place)
    names = {field.name for field in dataclasses.fields(options)}
    return f"Options {heading}", tuple(
        name for name in docstrings.attributes(kind) if name in names
    )


def parameters(function: Callable[..., Any]) -> set[str]:
    """Return the names of what a function must be called with, or may be."""
    return {
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    } - {"self", "cls"}
