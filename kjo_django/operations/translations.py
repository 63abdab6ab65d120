"""The words and numbers of the reader's language for what programs compare, store or send."""

from __future__ import annotations

from collections.abc import Callable

from django.utils.formats import number_format
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_noop as _

TEXTS = frozenset(
    (
        # Kinds of rows
        *(_("jobs"), _("failed_jobs"), _("failures"), _("dead_letters"), _("open_dead_letters")),
        *(_("workflows"), _("processed_events"), _("metric_buckets"), _("metric_rollups")),
        *(_("workers"), _("leases"), _("marks"), _("messages"), _("schedules")),
        # Why rows about a person are kept
        *(_("open_jobs"), _("steps_of_open_workflows"), _("messages_of_others")),
        # What is left of a person elsewhere
        _("Schedules with these arguments, which go on; edit or delete them."),
        _(
            "Ids of messages in processed_events, until RETENTION_PROCESSED_EVENTS: they keep what "
            "was erased from running again."
        ),
        _("Keys, ids and progress in leases, limits and marks, until they expire."),
        _("The last error that a running worker shows, until its next one or its end."),
        _("Logs, traces, error trackers and backups."),
        # States of jobs, workflows, schedules and dead letters
        *(_("waiting"), _("pending"), _("scheduled"), _("queued"), _("processing"), _("failing")),
        *(_("completed"), _("failed"), _("cancelled"), _("running"), _("held"), _("active")),
        *(_("paused"), _("broken"), _("ended"), _("disabled"), _("open"), _("replayed")),
        _("discarded"),
        # What operations have done to rows
        *(_("requeued"), _("due"), _("moved"), _("changed"), _("unchanged"), _("asked")),
        *(_("taken"), _("other_kind"), _("forbidden"), _("limited"), _("stopping"), _("gone")),
        *(_("not_found"), _("enqueued"), _("deleted"), _("declared"), _("refused"), _("skipped")),
        *(_("retried"), _("set")),
        # Why dead letters are not replayed
        *(_("replayed too often"), _("already processed"), _("no source topic")),
        *(_("an internal job"), _("it needs the permission of what it does")),
        # What topics need
        *(_("create"), _("grow"), _("none"), _("by hand")),
        # What kjo_migrate_celery counts
        *(_("declarations"), _("calls"), _("mocks"), _("settings")),
        # The checks of idempotency
        *(_("First event processing"), _("Duplicate event skipping")),
        *(_("Different service processing"), _("Different event processing")),
        *(_("Database verification"), _("Kafka idempotency")),
    )
)
PATTERNS = (
    *(_("keys (%s)"), _("ids (%s)"), _("the field %s")),
    _("the job is %s"),
    _("its job is %s"),
    _("it is %s already"),
    _("%s times; --force replays it"),
    _("Records in the topics %s, until their retention."),
    _("The person's among the rows whose contents could not be read (%s)."),
)


def ngettext_lazy(singular: str, plural: str) -> Callable[[int], str]:
    """Mark a text and its plural for translation; return what makes the text for a number, which
    it names where it has ``%d``, in the active language.

    The function of this name in Django makes two classes for each text. They took 36 kB, and a
    worker has all of them.
    """

    def text_for(count: int) -> str:
        text = ngettext(singular, plural, count)
        return text % count if "%d" in text else text

    return text_for


def grouped(count: float) -> str:
    """Return a count with its digits in groups, as the active language writes them."""
    return number_format(count, force_grouping=True)


def decimal(value: float, places: int) -> str:
    """Return a number, rounded to so many decimal places, with the decimal separator of the active
    language."""
    return number_format(f"{value:.{places}f}", places)


def translated(value: object) -> str:
    """Return a text of ``TEXTS`` or ``PATTERNS`` in the active language, any other unchanged."""
    text = str(value)
    if text in TEXTS:
        return gettext(text)
    for pattern in PATTERNS:
        start, _value, end = pattern.partition("%s")
        if text.startswith(start) and text.endswith(end) and len(text) > len(start) + len(end):
            return gettext(pattern) % translated(text[len(start) : len(text) - len(end)])
    return text
