"""KJOBackend in the places of the two backends the framework's tests were written for."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from kjo_django.contrib.tasks import KJOBackend
from kjo_django.models import Job
from tests.unit.deliveries import Bench


class DummyBackend(KJOBackend):
    """Stores and runs nothing, and can be asked for all it has stored."""

    _enqueued: ClassVar[list[Any]] = []

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        result = super().enqueue(task, args, kwargs)
        self._enqueued.append(result)
        return result

    @property
    def results(self) -> list[Any]:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return [self.get_result(str(job.pk)) for job in Job.objects.order_by("pk")]
        return self._enqueued  # no queries from an event loop

    def clear(self) -> None:
        self._enqueued.clear()
        Job.objects.all().delete()


class ImmediateBackend(KJOBackend):
    """A worker runs what is enqueued before ``enqueue`` returns."""

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        result = super().enqueue(task, args, kwargs)
        bench = Bench(task.queue_name)
        try:
            bench.run()
        finally:
            bench.close()
        result.refresh()
        return result
