"""Steps that note their calls, and do as the test says."""

from __future__ import annotations

from typing import Any

from kjo_django import PermanentError, job
from kjo_django.engine.handler.context import JobContext
from kjo_django.testing import drain

KJO = {"SERVICE_NAME": "tests", "QUEUES": {"flows": {}, "other": {}}}
MEMORY = {"TRANSPORTS": {"default": {"BACKEND": "kjo_django.transports.memory.MemoryTransport"}}}


class Steps:
    """Jobs of every shape a step has; ``calls`` has their names in the order of the calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing: set[str] = set()
        """Names of steps that fail for good."""
        self.seen: list[Any] = []
        self.adding: list[str] = []
        """Names of steps that ``add`` adds."""

        def note(name: str) -> str:
            if name in self.failing:
                raise PermanentError(f"{name} fails")
            self.calls.append(name)
            return name

        def double(value: int) -> int:
            self.calls.append(f"double {value}")
            return 2 * value

        def look(context: JobContext, name: str = "look", of: str = "") -> None:
            note(name)
            assert context.workflow is not None
            of_step = f"flows.{of}" if of else None
            self.seen = list(context.workflow.results(of_step))
            self.failures = [each.error for each in context.workflow.failures(of_step)]

        def add(context: JobContext, name: str) -> None:
            note(name)
            assert context.workflow is not None
            before = None
            for each in self.adding:
                after = before if each.startswith("then") else None
                before = context.workflow.add(self.note, name=each, after=after)

        async def anote(name: str) -> str:
            return note(name)

        self.take = note
        options: dict[str, Any] = {"queue": "flows", "max_attempts": 1}
        self.note = job(name="flows.note", **options)(note)
        self.outside = job(name="flows.outside", atomic=False, **options)(note)
        self.coroutine = job(name="flows.coroutine", atomic=False, **options)(anote)
        self.other = job(name="flows.other", queue="other", max_attempts=1)(note)
        self.double = job(name="flows.double", **options)(double)
        self.look = job(name="flows.look", takes_context=True, **options)(look)
        self.add = job(name="flows.add", takes_context=True, **options)(add)

    def run(self) -> list[str]:
        """Run all that is due until nothing is; return the names that were called meanwhile."""
        before = len(self.calls)
        drain(raise_errors=False)
        return self.calls[before:]
