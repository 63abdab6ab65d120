"""Workflows: the list, and one with its graph, its progress and what its steps wait for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

from django.http import Http404, HttpResponse
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from kjo_django import refusals
from kjo_django.admin.dashboard import graph
from kjo_django.admin.dashboard.figures import number
from kjo_django.admin.dashboard.graph import Node
from kjo_django.admin.dashboard.page import Page, Screen, button_actions, shared
from kjo_django.admin.display import short_arguments
from kjo_django.models import Job, Workflow
from kjo_django.operations.actions import Subject
from kjo_django.operations.redaction import hide_texts
from kjo_django.operations.search import quoted, running
from kjo_django.runtime import jobs_database
from kjo_django.states import OPEN_WORKFLOWS, JobStatus, WorkflowState
from kjo_django.store.counting import COUNT_LIMIT
from kjo_django.workflows import lists
from kjo_django.workflows.lists import StageSummary, WorkflowPage

SIZE = 50
SHOWN_STEPS = 300
"""Most rows of the table below the graph."""


def show_list(page: Page) -> HttpResponse:
    """Show a page of workflows, the newest first."""
    given = page.request.GET
    text = given.get("q", "").replace("\0", "").strip()[:255]
    state = given.get("state", "")
    state = state if state in WorkflowState.values else ""
    try:
        listed = lists.page(
            lists.find(state=state or None, text=text),
            after=given.get("after"),
            before=given.get("before"),
            size=SIZE,
        )
    except ValueError as error:
        raise Http404(refusals.shown(error)) from None
    offered = [each for each in button_actions(Subject.WORKFLOWS) if not each.has_required_inputs]
    rows = _rows(page, listed.rows)
    summary = ngettext("%d workflow on this page", "%d workflows on this page", len(rows))
    return page.show(
        "workflows.html",
        {
            "rows": rows,
            "q": text,
            "state": state,
            "tabs": _tabs(text, state),
            "actions": [each for each in offered if page.allows(each)],
            "links": _links(text, state, listed),
            "limit": COUNT_LIMIT,
            "summary": summary % len(rows),
        },
        controls="workflows_form.html",
        title=_("Workflows"),
    )


def _tabs(text: str, state: str) -> list[dict[str, Any]]:
    counts = {} if text else shared("workflow counts", lists.state_counts)
    tabs: list[dict[str, Any]] = [{"label": _("All"), "state": ""}]
    tabs += [
        {"label": each.label, "state": str(each), "count": counts.get(each)}
        for each in WorkflowState
    ]
    for tab in tabs:
        tab["url"] = _address(q=text, state=tab["state"])
        tab["is_here"] = tab["state"] == state
    return tabs


def _address(**values: str) -> str:
    return f"?{urlencode({name: value for name, value in values.items() if value})}"


def _links(text: str, state: str, listed: WorkflowPage) -> dict[str, str]:
    cursors = (("newer", "before", listed.previous), ("older", "after", listed.next))
    return {
        name: _address(q=text, state=state, **{parameter: cursor})
        for name, parameter, cursor in cursors
        if cursor
    }


def _rows(page: Page, found: Sequence[Workflow]) -> list[dict[str, Any]]:
    """Return the template's values of workflows."""
    if not page.may("view_payload"):
        hide_texts(found)
    facts = lists.facts(found)
    return [
        {
            **facts[each.pk],
            "key": each.pk,
            "title": each.unique_id or str(each.pk),
            "label": WorkflowState(each.state).label,
            "meter": f"{facts[each.pk]['percent']:.1f}",
            "progress": _progress(facts[each.pk]),
            "is_late": bool(each.deadline and each.deadline < (each.finished_at or timezone.now())),
            "url": page.url("workflow", each.pk),
        }
        for each in found
    ]


def _progress(facts: dict[str, Any]) -> str:
    numbers = {"ended": number(facts["steps"] - facts["open"]), "steps": number(facts["steps"])}
    return _("%(ended)s of %(steps)s") % numbers


# --- One ------------------------------------------------------------------------------------------


def show_one(page: Page, workflow: UUID) -> HttpResponse:
    """Show one workflow."""
    found = find(workflow)
    (row,) = _rows(page, [found])
    stages = _stages(found, row["open"])
    is_drawn = all(stage.id is not None for stage in stages)
    nodes = [_node(page, stage) for stage in _with_adders(found, stages)]
    if is_drawn:
        nodes = [_with_address(page, found, node) for node in graph.merged(nodes)]
        nodes = _with_arguments(page, nodes, stages)
    names = {node.key: node.name for node in nodes}
    return page.show(
        "workflow.html",
        {
            "row": row,
            "counts": _counts(page, found, stages),
            "graph": graph.render(nodes, found.name) if is_drawn else "",
            "steps": [
                {
                    "name": node.name,
                    "url": node.url,
                    "states": graph.states_of(node),
                    "waits": graph.some([names[key] for key in node.parents]),
                }
                for node in nodes[:SHOWN_STEPS]
            ],
            "holding": _holding(page, found),
            "buttons": page.buttons(Subject.WORKFLOWS, found.state, found.pk),
            "summary": f"{found.name}: {row['label']}, {row['progress']}",
        },
        title=_("Workflow %s") % found.name,
    )


def _stages(found: Workflow, open_steps: int) -> list[StageSummary]:
    """Return the stages of a workflow. What was read before its state or its number of open steps
    changed is not shown: the page would contradict itself."""

    def read() -> list[StageSummary]:
        return lists.stages(found, running() if found.state in OPEN_WORKFLOWS else ())

    name = f"stages {found.pk} {found.state} {open_steps}"
    stages: list[StageSummary] = shared(name, read)
    return stages


def find(workflow: UUID) -> Workflow:
    """Return a workflow.

    :raises Http404: there is none.
    """
    found: Workflow | None = Workflow.objects.using(jobs_database()).filter(pk=workflow).first()
    if found is None:
        raise Http404(_("There is no such workflow; it may have been pruned."))
    return found


def _node(page: Page, stage: StageSummary) -> Node:
    """Return the node of a stage. One step leads to its job, several lead to the list of them."""
    url = ""
    if page.may("view_job"):
        if stage.job is not None:
            url = page.url("job", stage.job)
        elif stage.id is not None:
            url = _jobs(page, f"stage:{stage.id}")
    return Node(
        key=stage.id or stage.handler,
        name=stage.handler,
        handler=stage.handler,
        counts=stage.counts,
        parents=stage.requires,
        url=url,
        is_added=stage.is_added,
    )


def _with_adders(found: Workflow, stages: Sequence[StageSummary]) -> list[StageSummary]:
    """Return the stages; those that a running step has added and that wait for none stand behind
    that step, where it is the only one that can have added them: what waits for it waits for what
    it has added."""
    followers: dict[str | None, set[str | None]] = defaultdict(set)
    for stage in stages:
        for required in stage.requires:
            followers[required].add(stage.id)
    first = [stage.id for stage in stages if stage.id is not None and not stage.is_added]
    return [
        replace(stage, requires=_adder(stage, first, followers))
        if stage.is_added and not stage.requires
        else stage
        for stage in stages
    ]


def _adder(
    stage: StageSummary, first: Sequence[str], followers: Mapping[str | None, set[str | None]]
) -> tuple[str, ...]:
    """Return the stage that has added another one, if only one can have.

    :param first: the stages that the workflow was enqueued with.
    """
    known = followers[stage.id]
    found = tuple(key for key in first if known and followers[key] == known)
    return found if len(found) == 1 else ()


def _with_arguments(
    page: Page, nodes: Sequence[Node], stages: Sequence[StageSummary]
) -> list[Node]:
    """Return the nodes; where several have one name and are one step each, each is named by its
    call, for users who may see payloads."""
    names = Counter(node.name for node in nodes)
    jobs = {stage.id: stage.job for stage in stages if stage.job is not None}
    alike = [node for node in nodes if names[node.name] > 1 and node.total == 1]
    wanted = {node.key: jobs[node.key] for node in alike if node.key in jobs}
    if not wanted or not page.may("view_payload"):
        return list(nodes)
    arguments = short_arguments([Job(pk=key) for key in wanted.values()])
    return [
        replace(node, name=f"{node.name.rpartition('.')[2]}({arguments[wanted[node.key]]})")
        if node.key in wanted
        else node
        for node in nodes
    ]


def _with_address(page: Page, found: Workflow, node: Node) -> Node:
    """Return the node of several stages with the address of the list of their jobs."""
    if node.url or not page.may("view_job"):
        return node
    return replace(node, url=_jobs(page, f"workflow:{found.pk} handler:{quoted(node.handler)}"))


def _jobs(page: Page, search: str) -> str:
    return f"{page.url('jobs')}?{urlencode({'q': search})}"


def _counts(page: Page, found: Workflow, stages: Sequence[StageSummary]) -> list[dict[str, Any]]:
    """Return the number of steps in each state, with the list of these."""
    counts: Counter[str] = Counter()
    for stage in stages:
        counts.update(stage.counts)
    return [
        {
            "count": counts[state],
            "label": state.label,
            "url": _jobs(page, f"workflow:{found.pk} state:{state}")
            if page.may("view_job")
            else "",
        }
        for state in JobStatus
        if counts[state]
    ]


def _holding(page: Page, found: Workflow) -> list[dict[str, Any]]:
    """Return the dead letters whose replay a workflow awaits."""
    if found.state != WorkflowState.HELD or not page.may("view_deadletter"):
        return []
    sees_texts = page.may("view_payload")
    return [
        {
            "name": letter["handler"],
            "error": letter["error"] if sees_texts else letter["error_type"],
            "url": page.url("letter", letter["pk"]),
        }
        for letter in lists.holding(found)
    ]


SCREENS = (
    Screen("workflows", "workflows/", show_list, "view_workflow", title=gettext_lazy("Workflows")),
    Screen("workflow", "workflows/<uuid:workflow>/", show_one, "view_workflow"),
)
