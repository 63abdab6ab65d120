"""A replay's report as text."""

from __future__ import annotations

from typing import Any

from kjo_django.management.commands._shared import KjoCommand, plain


def show_replay(command: KjoCommand, answer: Any) -> None:
    """Print the counts, what they consist of, and some of what was refused."""
    verb = "would be looked at" if answer["dry_run"] else "looked at"
    command.stdout.write(
        f"{answer['matched']:,} dead letters {verb}, {answer['replayed']:,} replayed, "
        f"{sum(answer['refused'].values()):,} refused, {answer['failed']:,} failed, "
        f"{answer['skipped']:,} skipped"
    )
    if answer["ended"]:
        ends = ", ".join(f"{count:,} {result}" for result, count in answer["ended"].items())
        command.stdout.write(f"Run here: {ends}")
    if answer["histogram"]:
        rows = [tuple(str(value or "-") for value in row.values()) for row in answer["histogram"]]
        command.table([("reason", "handler", "error", "count"), *rows])
    if answer["already_processed"]:
        command.stdout.write(
            f"{answer['already_processed']:,} have taken effect before; they run again only "
            "with --force"
        )
    for sample in answer["samples"]:
        command.stdout.write(plain(f"{sample['outcome']} {sample['id']}: {sample['detail']}"))
    if answer["stopped"]:
        command.stdout.write(command.style.ERROR(f"Stopped: {answer['stopped']}"))
