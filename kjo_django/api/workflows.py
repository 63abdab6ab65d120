"""Workflows: list, and show one with its stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.http import Http404
from rest_framework import serializers
from rest_framework.exceptions import ValidationError
from rest_framework.response import Response

from kjo_django.api.endpoints import ID, KjoView, endpoint, id_of, page_of
from kjo_django.api.fields import NamedChoice, columns, shape
from kjo_django.api.paging import PageQuery
from kjo_django.models import Workflow as WorkflowRow
from kjo_django.operations.redaction import hide_texts
from kjo_django.operations.search import running
from kjo_django.runtime import jobs_database
from kjo_django.states import OnFailure, WorkflowState
from kjo_django.workflows import lists
from kjo_django.workflows.lists import StageSummary

TAG = "workflows"
COLUMNS = ("id", "name", "unique_id", "reason", "created_at", "finished_at", "deadline")

Workflow = shape(
    "Workflow",
    "A workflow: its state, and how many of its steps have ended and how.",
    **columns(WorkflowRow, COLUMNS),
    state=NamedChoice("WorkflowState", WorkflowState.values),
    steps=serializers.IntegerField(help_text="All of them; it grows when a step adds others."),
    open=serializers.IntegerField(help_text="Those that wait, run, or will run."),
    completed=serializers.IntegerField(),
    failed=serializers.IntegerField(),
    cancelled=serializers.IntegerField(),
    percent=serializers.FloatField(help_text="Of steps that have ended."),
)
WorkflowPage = page_of(Workflow)
Stage = shape(
    "WorkflowStage",
    "Steps of one handler that wait for the same ones.",
    id=serializers.UUIDField(
        allow_null=True,
        help_text="null: the workflow has more than 1,000, which are counted by handler.",
    ),
    handler=serializers.CharField(),
    queue=serializers.CharField(),
    on_failure=serializers.CharField(
        allow_blank=True, help_text=f"One of {', '.join(OnFailure.values)}."
    ),
    steps=serializers.IntegerField(),
    states=serializers.DictField(
        child=serializers.IntegerField(), help_text="Steps by state, `processing` included."
    ),
    requires=serializers.ListField(
        child=serializers.UUIDField(), help_text="The stages it waits for."
    ),
    job=serializers.UUIDField(allow_null=True, help_text="The job, if it is one step."),
)
WorkflowDetail = shape(
    "WorkflowDetail",
    "A workflow with its stages.",
    Workflow,
    stages=Stage(many=True),
)
WorkflowOutcome = shape(
    "WorkflowOutcome",
    "What became of a request about a workflow, and the workflow after it.",
    outcome=serializers.CharField(),
    workflow=Workflow(),
)
WorkflowQuery = shape(
    "WorkflowQuery",
    "Which workflows.",
    PageQuery,
    state=NamedChoice("WorkflowState", WorkflowState.values, required=False),
    q=serializers.CharField(
        max_length=255,
        required=False,
        help_text="A name, a unique id or an id; the beginning of one, if it ends in `*`. Names "
        "and unique ids are looked for among the newest 100,000.",
    ),
)


@endpoint("workflows_list", TAG, ["view_workflow"], {200: WorkflowPage}, query=WorkflowQuery)
def list_workflows(view: KjoView) -> Response:
    """List workflows, the newest first."""
    query = view.query(WorkflowQuery)
    cursor = query.get("cursor")
    try:
        found = lists.page(
            lists.find(state=query.get("state"), text=query.get("q", "")),
            after=None if cursor is None else str(cursor),
            size=query["limit"],
        )
    except ValueError as error:
        raise ValidationError({"cursor": str(error)}) from None
    answer = {"results": summaries(view, found.rows), "next_cursor": found.next}
    return Response(WorkflowPage(answer).data)


@endpoint(
    "workflows_read", TAG, ["view_workflow"], {200: WorkflowDetail}, path=[ID], problems=[404]
)
def read_workflow(view: KjoView, id: str) -> Response:
    """Tell of one workflow, and of its stages in the order they were added."""
    row = find(id)
    stages = [_stage(each) for each in lists.stages(row, running())]
    return Response(WorkflowDetail({**summaries(view, [row])[0], "stages": stages}).data)


# --- Details --------------------------------------------------------------------------------------


def find(id: str) -> WorkflowRow:
    """Return a workflow.

    :raises Http404: there is none.
    """
    row = WorkflowRow.objects.using(jobs_database()).filter(pk=id_of(id)).first()
    if row is None:
        raise Http404
    return row


def summaries(view: KjoView, rows: Sequence[WorkflowRow]) -> list[dict[str, Any]]:
    """Return the members of each workflow in a list, for this user."""
    if not view.sees_payloads:
        hide_texts(rows)
    facts = lists.facts(rows)
    return [facts[row.pk] for row in rows]


def _stage(stage: StageSummary) -> dict[str, Any]:
    return {
        "id": stage.id,
        "handler": stage.handler,
        "queue": stage.queue,
        "on_failure": stage.on_failure,
        "steps": stage.steps,
        "states": stage.counts,
        "requires": stage.requires,
        "job": stage.job,
    }
