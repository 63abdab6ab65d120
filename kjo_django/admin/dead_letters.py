"""Dead letters: the message, the reason, replay and discard."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from kjo_django.admin.base import KjoAdmin
from kjo_django.admin.display import badge, show_bytes, show_headers, show_message, show_text
from kjo_django.admin.filters import (
    HandlerFilter,
    QueueFilter,
    ReasonFilter,
    StateFilter,
    newest,
)
from kjo_django.admin.jobs import may_see_payloads
from kjo_django.messages import headers as names
from kjo_django.models import DeadLetter
from kjo_django.operations.actions import Subject
from kjo_django.operations.safe_text import inert

RAW = ("shown_key", "shown_value", "shown_headers", "shown_traceback")


@admin.register(DeadLetter)
class DeadLetterAdmin(KjoAdmin):
    """Read-only, except for replay and discard."""

    screens = ("dead_letters", "letter")
    list_display = (
        "__str__",
        "shown_state",
        "reason",
        "queue",
        "shown_short_error",
        "attempts",
        "replay_count",
        "failed_at",
    )
    list_filter = (StateFilter, ReasonFilter, QueueFilter, HandlerFilter)
    search_fields = ("=id", "=message_id", "=fingerprint")
    search_help_text = _(
        "An exact id, or an exact message id or fingerprint among the newest 50,000."
    )
    never_listed = ("key", "value", "headers", "traceback")
    subject = Subject.LETTERS
    what_it_is = ("id", "shown_state", "reason", "handler", "queue", "message_id", "shown_job")
    why_it_died = ("error_type", "shown_error", "fingerprint", "attempts", "failed_at")
    what_became = ("replay_count", "closed_at", "note")
    where_it_was = ("topic", "partition", "offset", "consumer_group", "content_type")

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """Hide the raw message from users who may not see payloads."""
        sections = [
            (None, {"fields": self.what_it_is}),
            (_("Death"), {"fields": self.why_it_died}),
            (_("Since then"), {"fields": self.what_became}),
            (_("Source"), {"fields": self.where_it_was}),
        ]
        if may_see_payloads(request):
            sections.append((_("Raw message"), {"fields": RAW}))
        return sections

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Search by primary key; other texts among the newest rows."""
        term = search_term.strip()
        if not term:
            return queryset, False
        try:
            wanted = queryset.filter(pk=term)
            if wanted.exists():
                return wanted, False
        except (ValueError, forms.ValidationError):
            pass  # no id, so it is one of the others
        return newest(queryset).filter(Q(message_id=term) | Q(fingerprint=term)), False

    # --- Columns ----------------------------------------------------------------------------------

    @admin.display(description=_("state"))
    def shown_state(self, letter: DeadLetter) -> SafeString:
        """Return its state."""
        return badge(letter.state, letter.get_state_display())

    @admin.display(description=_("error"))
    def shown_short_error(self, letter: DeadLetter) -> str:
        """Return the beginning of the error."""
        text = ": ".join(filter(None, (letter.error_type, letter.error)))
        return inert(text[:120]) + ("…" if len(text) > 120 else "")

    @admin.display(description=_("error"))
    def shown_error(self, letter: DeadLetter) -> str:
        """Return its text."""
        return inert(letter.error)

    @admin.display(description=_("job"))
    def shown_job(self, letter: DeadLetter) -> SafeString | str:
        """Return a link to its job."""
        if letter.job_id is None:
            return "-"
        place = f"admin:{self.opts.app_label}_job_change"
        url = reverse(place, args=(letter.job_id,), current_app=self.admin_site.name)
        return format_html("<a href='{}'>{}</a>", url, letter.job_id)

    @admin.display(description=_("key"))
    def shown_key(self, letter: DeadLetter) -> SafeString:
        """Return its raw key."""
        return show_bytes(letter.key)

    @admin.display(description=_("value"))
    def shown_value(self, letter: DeadLetter) -> SafeString:
        """Return the decoded message."""
        return show_message(letter)

    @admin.display(description=_("headers"))
    def shown_headers(self, letter: DeadLetter) -> SafeString:
        """Return its raw headers."""
        return show_headers(names.from_json(letter.headers))

    @admin.display(description=_("traceback"))
    def shown_traceback(self, letter: DeadLetter) -> SafeString:
        """Return where the error was raised."""
        return show_text(letter.traceback)
