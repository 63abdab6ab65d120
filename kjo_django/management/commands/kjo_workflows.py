"""``kjo_workflows``: list workflows, show one, and change some."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.utils.translation import gettext as _

from kjo_django.management.commands._shared import KjoCommand, duration, plain, positive
from kjo_django.models import Workflow
from kjo_django.operations import workflows
from kjo_django.operations.jobs import Outcomes
from kjo_django.operations.search import running
from kjo_django.operations.translations import grouped, translated
from kjo_django.states import WorkflowState
from kjo_django.workflows import lists

ACTOR = "kjo_workflows"
CHANGES = ("cancel", "retry", "deadline")


class Command(KjoCommand):
    """List the newest workflows, show one with its stages, cancel, retry, or set a deadline.

    A workflow is named by its id, by its unique id, or by ``NAME/UNIQUE_ID``.
    """

    help = (
        "List the newest workflows; show one with its stages; cancel some, retry them from their "
        "failed steps, or set their deadline. Exit code 1: one was refused."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the action and its options."""
        super().add_arguments(parser)
        add = parser.add_argument
        add("action", choices=("list", "show", *CHANGES))
        add("ids", nargs="*", default=[], metavar="id", help="Ids or unique ids; a name, to list.")
        add("--state", choices=WorkflowState.values, help="list: only those in this state.")
        add("--limit", type=positive, default=20, help="list: at most this many.")
        add("--in", dest="ends_in", type=duration, help="deadline: from now, as 90s, 15m or 2h.")
        add("--never", action="store_true", help="deadline: remove it.")

    def run(self, options: dict[str, Any]) -> tuple[Any, bool]:
        """Carry out the action."""
        action, ids = options["action"], options["ids"]
        if action == "list":
            return {"action": action, "workflows": _listed(options)}, True
        if not ids:
            raise ValueError(_("%s needs the id of a workflow") % action)
        rows = [_find(id) for id in ids]
        if action == "show":
            facts = lists.facts(rows)
            found = [{**facts[row.pk], "stages": _stages(row)} for row in rows]
            return {"action": action, "workflows": found}, True
        outcomes = _change(rows, options)
        is_ok = outcomes.changed_count + outcomes.counts.get("unchanged", 0) == len(rows)
        return {"action": action, "outcomes": outcomes.counts}, is_ok

    def show(self, answer: Any) -> None:
        """Print one line for each workflow, and for each stage of those asked for."""
        if answer["action"] in CHANGES:
            counts = answer["outcomes"].items()
            self.stdout.write(
                ", ".join(f"{grouped(n)} {translated(result)}" for result, n in counts)
            )
            return
        if answer["action"] == "list":
            self.table([_heading(), *map(_line, answer["workflows"])])
            return
        for row in answer["workflows"]:
            self.table([_heading(), _line(row)])
            if row["reason"]:
                self.stdout.write(self.style.ERROR(plain(row["reason"])))
            numbers = {stage["id"]: index for index, stage in enumerate(row["stages"], start=1)}
            stages = [("", _("handler"), _("queue"), _("steps"), _("states"), _("after"))]
            for stage in row["stages"]:
                counts = stage["states"].items()
                states = ", ".join(
                    f"{grouped(count)} {translated(state)}" for state, count in counts
                )
                after = ", ".join(str(numbers[key]) for key in stage["requires"]) or "-"
                place = str(numbers[stage["id"]])
                what = stage["handler"], stage["queue"], grouped(stage["steps"])
                stages.append((place, *what, states, after))
            self.table(stages)


def _heading() -> tuple[str, ...]:
    return (
        *(_("name"), _("id"), _("unique id"), _("state"), _("ended"), _("failed")),
        *(_("created"), _("deadline")),
    )


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    ended = f"{grouped(row['steps'] - row['open'])}/{grouped(row['steps'])}"
    times = (
        f"{at:%Y-%m-%d %H:%M:%S}" if at else "-" for at in (row["created_at"], row["deadline"])
    )
    named = row["name"], str(row["id"]), row["unique_id"] or "-", translated(row["state"])
    return (*named, ended, grouped(row["failed"]), *times)


def _listed(options: dict[str, Any]) -> list[dict[str, Any]]:
    if len(options["ids"]) > 1:
        raise ValueError(_("list takes one name or id"))
    rows = lists.find(state=options["state"], text="".join(options["ids"]))
    found = lists.page(rows, size=min(options["limit"], lists.MAX_PAGE)).rows
    facts = lists.facts(found)
    return [facts[row.pk] for row in found]


def _find(id: str) -> Workflow:
    """Return the workflow of an id, or of a unique id that one workflow has.

    :raises ValueError: there is none, or there are several.
    """
    found = list(lists.find(text=id.removesuffix("*"))[:2])
    if len(found) != 1:
        text = _("Several workflows are %.300r") if found else _("There is no workflow %.300r")
        raise ValueError(text % id)
    return found[0]


def _change(rows: list[Workflow], options: dict[str, Any]) -> Outcomes:
    action, ends_in = options["action"], options["ends_in"]
    if action != "deadline":
        if ends_in is not None or options["never"]:
            raise ValueError(_("--in and --never go with deadline"))
        change = workflows.cancel if action == "cancel" else workflows.retry
        return change(rows, actor=ACTOR)
    if (ends_in is None) != options["never"]:
        raise ValueError(_("deadline needs --in DURATION, or --never"))
    seconds = None if ends_in is None else ends_in.total_seconds()
    return workflows.set_deadline(rows, seconds, actor=ACTOR)


def _stages(workflow: Workflow) -> list[dict[str, Any]]:
    return [
        {
            "id": stage.id,
            "handler": stage.handler,
            "queue": stage.queue,
            "on_failure": stage.on_failure,
            "steps": stage.steps,
            "states": dict(stage.counts),
            "requires": list(stage.requires),
            "job": stage.job,
        }
        for stage in lists.stages(workflow, running())
    ]
