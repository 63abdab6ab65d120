"""A chain of five no-ops from its enqueue to its end, beside Celery's chain with a Redis result
backend, as ``wait`` does it.

The caller looks every millisecond whether the workflow has ended: a handle's ``wait`` looks ever
more seldom. The promises differ as those of ``wait`` do.
"""

from __future__ import annotations

import time
from functools import partial

from kjo_django import chain
from kjo_django.enqueue.definition import JobDefinition
from kjo_django.states import OPEN_WORKFLOWS, WorkflowState
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.measures.wait import Sides, in_turns
from tests.ledger.jobs import no_op, no_op_only

STEPS = 5
TIMEOUT = 60.0
LOOK = 0.001
"""Seconds between two looks."""


def run(count: int, has_celery: bool) -> Sides | dict[str, float]:
    """Run so many chains on each side, one after the other."""
    return in_turns(_chains, "chain", count, has_celery)


def run_database_only(count: int, has_celery: bool) -> Sides | dict[str, float]:
    """The same with steps that may share a transaction."""
    return in_turns(partial(_chains, job=no_op_only), "chain", count, has_celery)


def _chains(count: int, name: str, job: JobDefinition[[], None] = no_op) -> list[float]:
    took = []
    for number in range(count):
        began = time.perf_counter()
        handle = chain(*(job.step() for _ in range(STEPS))).enqueue(name=f"{name}-{number}")
        while (state := handle.status) in OPEN_WORKFLOWS:
            if time.perf_counter() - began > TIMEOUT:
                raise BenchmarkError(f"A chain has not ended within {TIMEOUT:g} s")
            time.sleep(LOOK)
        if state != WorkflowState.COMPLETED:
            raise BenchmarkError(f"A chain is {state}")
        took.append(time.perf_counter() - began)
    return took
