"""``kjo_limits``: list the limits that hold over all workers, and change them."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from typing import Any

from django.utils.translation import gettext as _

from kjo_django.limits import control
from kjo_django.management.commands._shared import KjoCommand, positive
from kjo_django.operations.actions import ACTIONS
from kjo_django.operations.translations import grouped

ACTOR = "kjo_limits"
DECLARED = "declared"
"""Instead of a value: what was declared holds again."""


def _count(text: str) -> int | str:
    return DECLARED if text == DECLARED else positive(text)


class Command(KjoCommand):
    """List the limits, change one, or let what was declared hold again.

    A limit is named ``queue:<queue>`` or ``job:<registered name>``. Workers obey within two
    seconds.
    """

    help = (
        "List the limits that hold over all workers; set the rate, the burst or the concurrency of "
        "one; clear some, so that what was declared holds again."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the action and its options."""
        super().add_arguments(parser)
        add = parser.add_argument
        add("action", choices=("list", "set", "clear"))
        add(
            "names",
            nargs="*",
            default=[],
            metavar="name",
            help="queue:… or job:…; list: none for all.",
        )
        add("--rate", help=f"set: jobs that start in a time, as 5/s or 100/m; or {DECLARED}.")
        add("--burst", type=_count, help=f"set: jobs that may start at once; or {DECLARED}.")
        add(
            "--concurrency",
            type=_count,
            help=f"set: jobs that run at once in all workers together; or {DECLARED}.",
        )

    def run(self, options: dict[str, Any]) -> tuple[Any, bool]:
        """Carry out the action."""
        action, names = options["action"], list(dict.fromkeys(options["names"]))
        given = {name: options[name] for name in control.OPTIONS if options[name] is not None}
        known = {row["name"]: row for row in control.overview()}
        for name in set(names) - set(known):
            control.check_name(name)
        _check(action, names, given)
        if action == "list":
            rows = [known[name] for name in names or known if name in known]
            return {"action": action, "limits": rows}, True
        asked = {name: None if value == DECLARED else value for name, value in given.items()}
        change = ACTIONS["change_limits" if action == "set" else "clear_limits"]
        outcomes: Any = change.perform(names, actor=ACTOR, **asked)
        rows = [row for row in control.overview() if row["name"] in names]
        return {"action": action, "changed": outcomes.changed_count, "limits": rows}, True

    def show(self, answer: Any) -> None:
        """Print how many were changed, and one line for each limit."""
        if "changed" in answer:
            changed = _("Changed %s. Workers obey within two seconds.") % grouped(answer["changed"])
            self.stdout.write(changed if answer["changed"] else _("Nothing was changed."))
        if answer["limits"]:
            self.table([_heading(), *map(_line, answer["limits"])])
        elif answer["action"] == "list":
            self.stdout.write(_("There are no limits."))


def _check(action: str, names: Sequence[str], given: Mapping[str, Any]) -> None:
    """Check that an action has what it needs.

    :raises ValueError: it has not.
    """
    if given and action != "set":
        text = _("--%(options)s: only set takes values, not %(action)s")
        raise ValueError(text % {"options": ", --".join(given), "action": action})
    if action == "list":
        return
    if not names or (action == "set" and len(names) > 1):
        raise ValueError(_("%s needs the name of a limit, queue:… or job:…") % action)
    if action == "set" and not given:
        raise ValueError(_("set needs --rate, --burst or --concurrency"))


def _heading() -> tuple[str, ...]:
    return (
        *(_("name"), _("rate"), _("burst"), _("concurrency"), _("taken"), _("waiting")),
        *(_("declared"), _("set by")),
    )


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    declared = row["declared"]
    texts = [f"{_(option)} {declared[option]}" for option in control.OPTIONS if declared[option]]
    numbers = ("burst", "concurrency", "taken_count")
    counts = ("-" if row[name] is None else grouped(row[name]) for name in numbers)
    waiting = f"{grouped(row['waiting_count'])}{'+' if row['waiting_is_lower_bound'] else ''}"
    return (
        *(row["name"], row["rate"] or "-", *counts, waiting),
        *(", ".join(texts) or "-", row["changed_by"] or "-"),
    )
