"""Tasks on our backend, run by a worker that is driven by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest

from kjo_django import registry
from tests.unit import deliveries
from tests.unit.deliveries import Bench

NAME = "django.tasks"
BACKEND = "kjo_django.contrib.tasks.KJOBackend"
QUEUES = ["default", "mails"]


@pytest.fixture
def tasks(settings: Any) -> Iterator[Any]:
    """The tests' tasks, on a backend of ours."""
    settings.KJO = {**deliveries.KJO, "QUEUES": {}}
    settings.TASKS = {
        "default": {"BACKEND": BACKEND, "QUEUES": QUEUES},
        "other": {"BACKEND": BACKEND, "QUEUES": []},
        "plain": {"BACKEND": BACKEND, "OPTIONS": {"atomic": False, "max_attempts": 2}},
        "immediate": {"BACKEND": "kjo_django.contrib.tasks.ImmediateBackend"},
        "dummy": {"BACKEND": "kjo_django.contrib.tasks.DummyBackend"},
    }
    with registry.isolated():
        import_module("kjo_django.contrib.tasks").load_backends()
        yield import_module("tests.contrib.declared")


@pytest.fixture
def work(tasks: Any, db: None) -> Iterator[Callable[[], Bench]]:
    """Run every attempt there is; the worker that ran them."""
    benches: list[Bench] = []

    def run(queue: str = "default") -> Bench:
        bench = Bench(queue)
        benches.append(bench)
        bench.run_until_done()
        return bench

    yield run
    for bench in benches:
        bench.close()
