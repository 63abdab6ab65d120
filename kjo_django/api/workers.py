"""Workers: list, and show one."""

from __future__ import annotations

from typing import Any

from django.http import Http404
from rest_framework import serializers
from rest_framework.response import Response

from kjo_django.api.endpoints import ID, KjoView, endpoint, id_of, page_of
from kjo_django.api.fields import NamedChoice, columns, shape
from kjo_django.api.paging import PageQuery, page
from kjo_django.models import Worker as WorkerRow
from kjo_django.operations.redaction import hide_texts
from kjo_django.operations.workers import alive_within, assignments, rebalanced_at
from kjo_django.runtime import jobs_database

TAG = "workers"
COLUMNS = (
    *("name", "hostname", "pid", "release", "concurrency", "is_relaying", "in_flight_count"),
    *("processed_count", "failed_count", "started_at", "heartbeat_at", "clock_ahead"),
)
DETAILS = ("rss_bytes", "last_error")

Worker = shape(
    "Worker",
    "A process of `kjo_consume` or `kjo_produce`.",
    **columns(WorkerRow, COLUMNS),
    id=serializers.UUIDField(help_text="Each start of a process has its own."),
    state=NamedChoice("WorkerState", WorkerRow.State.values),
    is_alive=serializers.BooleanField(help_text="Whether it showed a sign of life lately."),
    asked_to=NamedChoice(
        "WorkerRequest",
        WorkerRow.Request.values,
        help_text="What it was asked to do; empty: nothing.",
    ),
    queues=serializers.ListField(child=serializers.CharField(), help_text="Empty: all."),
)
WorkerPage = page_of(Worker)


RunningJob = shape(
    "RunningJob",
    "A job that ran in a worker when it showed its last sign of life.",
    id=serializers.CharField(help_text="The job's, or that of a message nobody enqueued here."),
    handler=serializers.CharField(allow_blank=True),
    started_at=serializers.DateTimeField(),
)
HeldPartition = shape(
    "HeldPartition",
    "A partition that is a worker's.",
    group=serializers.CharField(
        allow_null=True, help_text="The consumer group; null: an older release wrote it."
    ),
    topic=serializers.CharField(),
    partition=serializers.IntegerField(help_text="0 where the transport has no partitions."),
    rebalanced_at=serializers.DateTimeField(
        allow_null=True, help_text="When the worker's assignment in the group changed last."
    ),
    resting_until=serializers.DateTimeField(
        allow_null=True, help_text="It hands out nothing until then."
    ),
    waiting_since=serializers.DateTimeField(
        allow_null=True, help_text="Since when a fetched record of it waits for a free lane."
    ),
    running=RunningJob(many=True, help_text="Those that have run longest; five of a worker."),
)
WorkerDetail = shape(
    "WorkerDetail",
    "A worker with what it holds and what it met last.",
    Worker,
    partitions=HeldPartition(many=True),
    rebalanced_at=serializers.DateTimeField(
        allow_null=True, help_text="When its partitions changed last; null: it has none."
    ),
    **columns(WorkerRow, DETAILS),
)


WorkerQuery = shape(
    "WorkerQuery",
    "Which workers.",
    PageQuery,
    state=NamedChoice("WorkerState", WorkerRow.State.values, required=False),
)


@endpoint("workers_list", TAG, ["view_worker"], {200: WorkerPage}, query=WorkerQuery)
def list_workers(view: KjoView) -> Response:
    """List workers, those started last first; `kjo_prune` deletes those long gone."""
    query = view.query(WorkerQuery)
    rows = WorkerRow.objects.using(jobs_database()).defer("partitions")
    if "state" in query:
        rows = rows.filter(state=query["state"])
    found, cursor = page(rows, rows, cursor=query.get("cursor"), limit=query["limit"])
    answer = {"results": [summary(row) for row in found], "next_cursor": cursor}
    return Response(WorkerPage(answer).data)


@endpoint("workers_read", TAG, ["view_worker"], {200: WorkerDetail}, path=[ID], problems=[404])
def read_worker(view: KjoView, id: str) -> Response:
    """Tell of one worker."""
    row = find(id)
    assigned = assignments(row.partitions)
    if not view.sees_payloads:
        hide_texts([row])
    answer = summary(row) | {name: getattr(row, name) for name in DETAILS}
    answer |= {"partitions": assigned, "rebalanced_at": rebalanced_at(assigned)}
    return Response(WorkerDetail(answer).data)


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
    """Return a worker's members in a list."""
    answer = {name: getattr(row, name) for name in (*COLUMNS, "id", "state", "asked_to", "queues")}
    return answer | {"is_alive": row.is_alive(alive_within())}
