"""Workers: look at them, quiet and stop them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from django.http import Http404
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from kjo_django.api.base import KjoView, id_of
from kjo_django.api.fields import Shape, Word
from kjo_django.api.job_shapes import NoBody
from kjo_django.api.openapi import ID, documented, page_of
from kjo_django.api.paging import PageQuery, page
from kjo_django.api.problems import Conflict
from kjo_django.models import Worker as WorkerRow
from kjo_django.operations import workers
from kjo_django.operations.redaction import hide_texts
from kjo_django.operations.workers import AskResult, alive_within, assignments, rebalanced_at
from kjo_django.store.transactions import jobs_database

TAG = "workers"

_PLAIN = (
    *("id", "name", "hostname", "pid", "state", "wish", "queues", "release", "concurrency"),
    *("is_relaying", "in_flight_count", "processed_count", "failed_count", "started_at"),
    "heartbeat_at",
)
_DETAILS = ("rss_bytes", "last_error")


class Worker(Shape):
    """A process of `kjo_consume` or `kjo_produce`."""

    id = serializers.UUIDField(help_text="Each start of a process has its own.")
    name = serializers.CharField()
    hostname = serializers.CharField()
    pid = serializers.IntegerField()
    state = Word("WorkerState", WorkerRow.State.values)
    is_alive = serializers.BooleanField(help_text="Whether it showed a sign of life lately.")
    wish = Word(
        "WorkerWish", WorkerRow.Wish.values, help_text="What it was asked to do; empty: nothing."
    )
    queues = serializers.ListField(child=serializers.CharField(), help_text="Empty: all.")
    release = serializers.CharField(allow_blank=True)
    concurrency = serializers.IntegerField()
    is_relaying = serializers.BooleanField()
    in_flight_count = serializers.IntegerField()
    processed_count = serializers.IntegerField()
    failed_count = serializers.IntegerField()
    started_at = serializers.DateTimeField()
    heartbeat_at = serializers.DateTimeField()


WorkerPage = page_of(Worker)


class RunningJob(Shape):
    """A job that ran in a worker when it showed its last sign of life."""

    id = serializers.CharField(help_text="The job's, or that of a message nobody enqueued here.")
    handler = serializers.CharField(allow_blank=True)
    started_at = serializers.DateTimeField()


class HeldPartition(Shape):
    """A partition that is a worker's."""

    group = serializers.CharField(
        allow_null=True, help_text="The consumer group; null: an older release wrote it."
    )
    topic = serializers.CharField()
    partition = serializers.IntegerField(help_text="0 where the transport has no partitions.")
    rebalanced_at = serializers.DateTimeField(
        allow_null=True, help_text="When the worker's assignment in the group changed last."
    )
    resting_until = serializers.DateTimeField(
        allow_null=True, help_text="It hands out nothing until then."
    )
    running = RunningJob(many=True, help_text="Those that have run longest; five of a worker.")


class WorkerDetail(Worker):
    """A worker with what it holds and what it met last."""

    partitions = HeldPartition(many=True)
    rebalanced_at = serializers.DateTimeField(
        allow_null=True, help_text="When its partitions changed last; null: it has none."
    )
    rss_bytes = serializers.IntegerField(allow_null=True)
    last_error = serializers.CharField(allow_blank=True)


class WorkerQuery(PageQuery):
    """Which workers."""

    state = Word("WorkerState", WorkerRow.State.values, required=False)


class WorkerOutcome(Shape):
    """What became of a request about a worker, and the worker after it."""

    outcome = Word("WorkerAnswer", [AskResult.ASKED, AskResult.UNCHANGED])
    worker = Worker()


class WorkersView(KjoView):
    """All workers."""

    permissions: ClassVar = {"GET": ("view_worker",)}

    @documented("workers_list", TAG, {200: WorkerPage}, query=WorkerQuery)
    def get(self, request: Request) -> Response:
        """List workers, those started last first; `kjo_prune` deletes those long gone."""
        query = self.query(WorkerQuery)
        rows = WorkerRow.objects.using(jobs_database()).defer("partitions")
        if "state" in query:
            rows = rows.filter(state=query["state"])
        found = page(rows, rows, cursor=query.get("cursor"), limit=query["limit"])
        answer = {"results": [summary(row) for row in found.rows], "next_cursor": found.next_cursor}
        return Response(WorkerPage(answer).data)


class WorkerView(KjoView):
    """One worker."""

    permissions: ClassVar = {"GET": ("view_worker",)}

    @documented("workers_read", TAG, {200: WorkerDetail}, path=[ID], problems=[404])
    def get(self, request: Request, id: str) -> Response:
        """Tell of one worker."""
        row = find(id)
        held = assignments(row.partitions)
        if not self.sees_payloads:
            hide_texts([row])
        answer = summary(row) | {name: getattr(row, name) for name in _DETAILS}
        answer |= {"partitions": held, "rebalanced_at": rebalanced_at(held)}
        return Response(WorkerDetail(answer).data)


class _AskView(KjoView):
    permissions: ClassVar = {"POST": ("view_worker", "control_worker")}

    def ask(self, id: str, act: Callable[..., Any], message: str) -> Response:
        """Ask one worker for something."""
        self.body(NoBody)
        row = find(id)
        outcomes = act([row.pk], actor=self.actor, on_changed=self.audit(message))
        result = next(iter(outcomes.counts))
        if result == AskResult.NOT_FOUND:
            raise Http404
        if result == AskResult.GONE:
            raise Conflict("The worker has stopped, or shows no sign of life.")
        if result == AskResult.STOPPING:
            raise Conflict("The worker was asked to stop, which nothing undoes.")
        answer = {"outcome": result, "worker": summary(find(id))}
        return Response(WorkerOutcome(answer).data)


class QuietView(_AskView):
    """Quieting one worker."""

    @documented(
        "workers_quiet", TAG, {200: WorkerOutcome}, body=NoBody, path=[ID], problems=[404, 409]
    )
    def post(self, request: Request, id: str) -> Response:
        """Let a worker start nothing more; what runs there ends, and it stays until stopped."""
        return self.ask(id, workers.quiet, "Asked to start nothing more.")


class UnquietView(_AskView):
    """Undoing quiet."""

    @documented(
        "workers_unquiet", TAG, {200: WorkerOutcome}, body=NoBody, path=[ID], problems=[404, 409]
    )
    def post(self, request: Request, id: str) -> Response:
        """Let a quiet worker go on."""
        return self.ask(id, workers.unquiet, "Asked to go on.")


class StopView(_AskView):
    """Stopping one worker."""

    @documented(
        "workers_stop", TAG, {200: WorkerOutcome}, body=NoBody, path=[ID], problems=[404, 409]
    )
    def post(self, request: Request, id: str) -> Response:
        """Let a worker stop as a SIGTERM would."""
        return self.ask(id, workers.stop, "Asked to stop.")


# --- Details --------------------------------------------------------------------------------------


def find(id: str) -> WorkerRow:
    """Return a worker.

    :raises Http404: there is none.
    """
    row = WorkerRow.objects.using(jobs_database()).filter(pk=id_of(id)).first()
    if row is None:
        raise Http404
    return row


def summary(row: WorkerRow) -> dict[str, Any]:
    """Return what is told of a worker in a list."""
    answer = {name: getattr(row, name) for name in _PLAIN}
    return answer | {"is_alive": row.is_alive(alive_within())}
