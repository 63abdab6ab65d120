"""``kjo_replay_dlq``: run dead letters again."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.utils.translation import gettext as _

from kjo_django.management.commands._shared import KjoCommand, instant, plain, positive, rate
from kjo_django.operations import dead_letters
from kjo_django.operations.dead_letters import DeadLetterFilter, ReplayReport
from kjo_django.operations.topic_replay import TopicReplay, replay_topic
from kjo_django.operations.translations import grouped, translated
from kjo_django.runtime import refuse_elsewhere


class Command(KjoCommand):
    """Replay open dead letters, from the table or from a topic others filled."""

    help = "Run open dead letters again, from the table or from a topic others filled."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare filters, source and limits."""
        super().add_arguments(parser)
        add = parser.add_argument
        add("--source", choices=("table", "topic"), default="table", help="Where they are read.")
        add("--queue", help="Only dead letters of this queue and its retries.")
        add("--type", dest="handler", help="Only those of this handler.")
        add("--reason", help="Only those that died for this reason, such as exhausted.")
        add("--error", help="Only those whose error contains this text.")
        add("--fingerprint", help="Only those of this group of equal errors (table).")
        add("--since", type=instant, help="Died at or after: 2026-01-31T12:00, or 2h ago as 2h.")
        add("--until", type=instant, help="Died before; given like --since.")
        add("--id", dest="ids", action="append", help="This dead letter (table) or message id.")
        add("--topic", help="With --source topic: the dead-letter topic to read.")
        add("--transport", default="default", help="With --source topic: its transport's alias.")
        add("--target", help="With --source topic: publish here, not to each record's origin.")
        add("--group", help="With --source topic: consumer group that remembers how far it got.")
        add("--limit", type=positive, help="Replay at most this many.")
        add("--rate", type=rate, help="At most this many per second, 0.01 to 100,000.")
        add("--dry-run", action="store_true", help="Change nothing; show what would happen.")
        add("--force", action="store_true", help="Also what was replayed too often or took effect.")

    def run(self, options: dict[str, Any]) -> tuple[Any, bool]:
        """Replay from the source asked for."""
        filters = ("ids", "handler", "queue", "reason", "error", "fingerprint", "since", "until")
        chosen = DeadLetterFilter(**_given(options, *filters))
        if options["queue"]:
            refuse_elsewhere(options["queue"])
        shared: dict[str, Any] = {
            **_given(options, "limit", "rate", "dry_run", "force"),
            "actor": "kjo_replay_dlq",
        }
        of = self._replay_table if options["source"] == "table" else self._replay_topic
        report = of(options, chosen, shared)
        return report.as_dict(), report.is_ok

    def _replay_table(
        self, options: dict[str, Any], chosen: DeadLetterFilter, shared: dict[str, Any]
    ) -> ReplayReport:
        for name in ("topic", "target", "group"):
            if options[name]:
                raise ValueError(_("--%s goes with --source topic") % name)
        unknown, closed = dead_letters.not_open(options["ids"] or ())
        if unknown:
            raise ValueError(_("No dead letter has the id %s") % ", ".join(unknown))
        report = dead_letters.replay(chosen, progress=self.progress(_("Looked at")), **shared)
        for id, state in closed.items():
            report.skip(id, f"it is {state} already")
        return report

    def _replay_topic(
        self, options: dict[str, Any], chosen: DeadLetterFilter, shared: dict[str, Any]
    ) -> ReplayReport:
        if not options["topic"]:
            raise ValueError(_("--source topic needs --topic NAME, such as --topic orders-dlq"))
        places = _given(options, "topic", "transport", "target", "group")
        request = TopicReplay(**places, selection=chosen, **shared)
        report = replay_topic(request, progress=self.progress(_("Looked at")))
        if report.unknown_ids:
            text = _(
                "No record of %(topic)s has the id %(ids)s, of those that %(group)s has not "
                "passed; %(count)s others were replayed"
            )
            facts = {"topic": options["topic"], "ids": ", ".join(report.unknown_ids)}
            facts |= {"group": request.group_name, "count": grouped(report.replayed)}
            raise ValueError(text % facts)
        return report

    def show(self, answer: Any) -> None:
        """Print the counts, what they consist of, and some of what was refused."""
        text = _(
            "%(matched)s dead letters match, %(refused)s would be refused; nothing was changed"
        )
        if not answer["dry_run"]:
            text = _(
                "%(matched)s dead letters match, %(replayed)s replayed, %(refused)s refused, "
                "%(failed)s failed, %(skipped)s skipped"
            )
        counts = {
            name: grouped(answer[name]) for name in ("matched", "replayed", "failed", "skipped")
        }
        counts["refused"] = grouped(sum(answer["refused"].values()))
        self.stdout.write(text % counts)
        if answer["histogram"]:
            rows = [[value or "-" for value in row.values()] for row in answer["histogram"]]
            self.table([(_("reason"), _("handler"), _("error"), _("count")), *rows])
        if answer["already_processed"]:
            text = _("%s have taken effect before; they run again only with --force")
            self.stdout.write(text % grouped(answer["already_processed"]))
        for sample in answer["samples"]:
            outcome, detail = translated(sample["outcome"]), translated(sample["detail"])
            self.stdout.write(plain(f"{outcome} {sample['id']}: {detail}"))
        if answer["stopped"]:
            self.stdout.write(self.style.ERROR(_("Stopped: %s") % answer["stopped"]))


def _given(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: options[name] for name in names}
