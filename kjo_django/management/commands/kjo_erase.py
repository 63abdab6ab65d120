"""``kjo_erase``: delete or redact what the tables hold of a person."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from typing import Any

from django.utils.translation import gettext as _

from kjo_django.management.commands._shared import KjoCommand, chosen_databases
from kjo_django.operations.translations import grouped, translated
from kjo_django.personal_data.erasure import Mode, erase
from kjo_django.personal_data.person import Person

ACTOR = "kjo_erase"


class Command(KjoCommand):
    """Erase the jobs, failures, dead letters, results and messages of a person."""

    without_database = "to be given where there are several"
    help = (
        "Delete or redact what the tables hold of a person, and say what is left elsewhere. Exit "
        "code 1: rows were kept, such as open jobs; run it again when they have ended."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare what the person is found by, and what becomes of the rows."""
        super().add_arguments(parser)
        add = parser.add_argument
        more: dict[str, Any] = {"action": "append", "default": []}
        add("--key", dest="keys", **more, help="Of jobs, dead letters and messages. Repeatable.")
        ids = "A unique id, or the id of a job or message. Repeatable."
        add("--id", dest="ids", **more, help=ids)
        fields = "A field of payloads, results and event data, *=VALUE for any. Repeatable."
        add("--field", dest="fields", metavar="PATH=VALUE", **more, help=fields)
        stdin = "Read keys, ids and fields as JSON, which process lists and histories do not show."
        add("--stdin", action="store_true", help=stdin)
        add("--redact", action="store_true", help="Empty the rows instead of deleting them.")
        cancel = "Also cancel the person's open jobs and workflows, and erase them."
        add("--cancel", action="store_true", help=cancel)
        add("--dry-run", action="store_true", help="Only count.")
        add("--reference", default="", help="Of the request, for the log: a number, no name.")

    def run(self, options: dict[str, Any]) -> tuple[Any, bool]:
        """Erase, or count with ``--dry-run``."""
        if len(chosen := chosen_databases(options)) > 1:
            raise ValueError(
                _(
                    "The person may have rows in each of several databases: run it for each "
                    "--database of %s."
                )
                % ", ".join(chosen)
            )
        given: Any = {name: options[name] for name in ("keys", "ids", "fields")}
        if options["stdin"] and any(given.values()):
            raise ValueError(_("--stdin replaces --key, --id and --field; do not give both"))
        if options["stdin"]:
            given = json.load(sys.stdin)
        shows: dict[str, Any] = {}

        def on_read(kind: str, count: int) -> None:
            shows.setdefault(kind, self.progress(translated(kind)))(count, None)

        report = erase(
            Person.parse(given),
            mode=Mode.REDACT if options["redact"] else Mode.DELETE,
            cancel=options["cancel"],
            dry_run=options["dry_run"],
            actor=ACTOR,
            reference=options["reference"],
            on_read=on_read,
        )
        return report.as_dict(), report.is_complete

    def show(self, answer: Any) -> None:
        """Print the counts, and what is left."""
        texts = {
            (False, False): _("%(kind)s: %(count)s deleted or emptied"),
            (False, True): _("%(kind)s: %(count)s would be deleted or emptied"),
            (True, False): _("%(kind)s: %(count)s redacted"),
            (True, True): _("%(kind)s: %(count)s would be redacted"),
        }
        done, kept = (
            texts[answer["mode"] == Mode.REDACT, answer["dry_run"]],
            _("%(kind)s: %(count)s kept"),
        )
        lines = _lines(done, answer["erased"]) or [_("Nothing was found to erase.")]
        lines += _lines(kept, answer["kept"])
        lines += [_("What remains:"), *(f"  {translated(text)}" for text in answer["left"])]
        self.stdout.write("\n".join(lines))


def _lines(text: str, counts: dict[str, int]) -> list[str]:
    return [text % {"kind": translated(kind), "count": grouped(n)} for kind, n in counts.items()]
