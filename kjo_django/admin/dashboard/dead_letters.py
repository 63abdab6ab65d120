"""Dead letters: by error, as a list, and one in detail."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode
from uuid import UUID

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpResponse, QueryDict
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from kjo_django.admin.actions import show_report
from kjo_django.admin.dashboard.page import Page, Screen, button_actions, screen_of, shared
from kjo_django.admin.display import (
    inert_json,
    short_arguments,
    show_bytes,
    show_headers,
    show_message,
)
from kjo_django.exceptions import KjoError, MessageError, PausableError
from kjo_django.messages import headers as names
from kjo_django.messages.serializers import JSON, Serializer, serializer_for
from kjo_django.models import DeadLetter, DeadLetterReason, DeadLetterState, JobFailure
from kjo_django.operations import dead_letters, redaction
from kjo_django.operations.actions import ACTIONS, Subject
from kjo_django.operations.dead_letters import DeadLetterFilter, processed
from kjo_django.operations.fingerprints import error_groups
from kjo_django.operations.internal import is_internal
from kjo_django.operations.redaction import LONGEST_SHOWN
from kjo_django.refusals import shown
from kjo_django.runtime import jobs_database

SIZE = 50
GROUPS = 50
FIELDS = ("queue", "handler", "reason", "error", "fingerprint")
"""The fields of `DeadLetterFilter` that a selection may have."""
MOST_CHOSEN = 1000


def selection_of(page: Page, given: QueryDict) -> DeadLetterFilter:
    """Return the filter in an address or a form.

    :raises PermissionDenied: it searches texts that the user may not see.
    """
    values: dict[str, Any] = {
        name: given.get(name, "").replace("\0", "").strip()[:255] or None for name in FIELDS
    }
    try:
        ids = [UUID(id) for id in given.getlist("letter")[:MOST_CHOSEN]]
    except ValueError:
        raise Http404(_("There is no such dead letter; it may have been pruned.")) from None
    if values["error"] and not page.may("view_payload"):
        raise PermissionDenied(_("To search error texts takes the permission to see payloads."))
    return DeadLetterFilter(ids=ids or None, **values)


def address_of(selection: DeadLetterFilter) -> str:
    """Return the selection as the query of an address."""
    pairs = [(name, value) for name in FIELDS if (value := getattr(selection, name))]
    return urlencode([*pairs, *(("letter", str(id)) for id in selection.ids or ())])


def show_groups(page: Page) -> HttpResponse:
    """Return the open dead letters, grouped by error."""
    selection = selection_of(page, page.request.GET)
    name = f"error groups {address_of(selection)}"
    groups = shared(name, lambda: error_groups(selection, limit=GROUPS), 2)
    if not page.may("view_payload"):
        groups = [replace(group, error="") for group in groups]
    rows = [
        {"group": group, "query": urlencode({"fingerprint": group.fingerprint})} for group in groups
    ]
    return page.show(
        "groups.html",
        {
            **_context(page, selection),
            "rows": rows,
            "shown": GROUPS,
            "summary": ngettext("%d group of errors", "%d groups of errors", len(rows)) % len(rows),
        },
        controls="letters_form.html",
        title=_("Dead letters"),
    )


def show_letters(page: Page) -> HttpResponse:
    """Return dead letters one by one, newest first."""
    selection = selection_of(page, page.request.GET)
    try:
        letters, older = _page(selection, page.request.GET.get("after", ""))
    except ValueError as error:
        page.message(shown(error), messages.ERROR)
        return page.back("letters")
    if not page.may("view_payload"):
        redaction.hide_texts(letters)
    arguments = short_arguments(letters) if page.may("view_payload") else {}
    for letter in letters:
        letter.short_arguments = arguments.get(letter.pk)  # type: ignore[attr-defined]
    query = address_of(selection)
    return page.show(
        "letters.html",
        {
            **_context(page, selection),
            "letters": letters,
            "older": older and f"?{query}{'&' if query else ''}after={older}",
        },
        controls="letters_form.html",
        title=_("Dead letters"),
    )


def _context(page: Page, selection: DeadLetterFilter) -> dict[str, Any]:
    return {
        "actions": _actions(page),
        "selection": selection,
        "query": address_of(selection),
        "reasons": DeadLetterReason.choices,
    }


def _actions(page: Page) -> list[dict[str, Any]]:
    return [
        {"label": action.label, "url": page.url(screen_of(action))}
        for action in button_actions(Subject.LETTERS)
        if page.allows(action)
    ]


def _page(selection: DeadLetterFilter, after: str) -> tuple[list[DeadLetter], UUID | None]:
    rows: QuerySet[DeadLetter] = dead_letters.select(selection).order_by("-pk")
    if after:
        try:
            rows = rows.filter(pk__lt=UUID(after))
        except ValueError:
            raise ValueError(_("This page does not exist: %s") % after[:80]) from None
    found = list(rows.defer("value", "headers", "traceback", "key")[: SIZE + 1])
    return found[:SIZE], found[SIZE - 1].pk if len(found) > SIZE else None


# --- One ------------------------------------------------------------------------------------------


def find(letter: UUID) -> DeadLetter:
    """Return a dead letter.

    :raises Http404: there is none.
    """
    rows = DeadLetter.objects.using(jobs_database()).select_related("job")
    found: DeadLetter | None = rows.defer("job__payload", "job__result").filter(pk=letter).first()
    if found is None:
        raise Http404(_("There is no such dead letter; it may have been pruned."))
    return found


def show_one(page: Page, letter: UUID) -> HttpResponse:
    """Show a dead letter in detail."""
    found = find(letter)
    may_see = page.may("view_payload")
    if not may_see:
        redaction.hide_texts([found])
    return page.show(
        "letter.html",
        {
            "letter": found,
            "actions": _actions(page),
            "is_open": found.state == DeadLetterState.OPEN,
            "has_taken_effect": bool(processed({found.message_id: found.handler})),
            "value": show_message(found) if may_see else None,
            "key": show_bytes(found.key) if may_see else None,
            "headers": show_headers(names.from_json(found.headers)) if may_see else None,
            "log": _log_of(found) if may_see else "",
            "summary": f"{found.error_type}: {found.get_state_display()}",
        },
        title=_title(found),
    )


def _log_of(letter: DeadLetter) -> str:
    """Return the lines that were logged in the attempt with which a job has died."""
    attempts = JobFailure.objects.using(jobs_database()).filter(
        job=letter.job_id, attempt=letter.attempts, failed_at=letter.failed_at
    )
    return attempts.values_list("log", flat=True).first() or ""


def _title(letter: DeadLetter) -> str:
    """Return what failed and of what, without the error's text, which may quote the payload."""
    what = letter.handler or letter.topic or _("Message")
    return f"{what}: {letter.error_type or letter.get_reason_display()}"


def edit(page: Page, letter: UUID) -> HttpResponse:
    """Replay a dead letter with a payload repaired by hand."""
    action = ACTIONS["edit_and_replay_letters"]
    if not all(map(page.may, ("view_payload", *action.permissions))):
        raise PermissionDenied
    found = find(letter)
    if found.state != DeadLetterState.OPEN:
        page.message(_("It is closed already: %s") % found.get_state_display(), messages.WARNING)
        return page.back("letter", letter)
    text = page.request.POST.get("value")
    problem = ""
    if text is not None:
        try:
            report = action.perform(
                [letter],
                payload=_written(found, text),
                actor=page.actor,
                on_changed=page.audit(action.log_entry({})),
            )
        except (KjoError, ValueError) as error:
            problem = shown(error)
        else:
            show_report(page.message, action, report)
            if found.job_id is not None and page.may("view_job"):
                return page.back("job", found.job_id)
            return page.back("letter", letter)
    else:
        text, problem = _editable(found)
    return page.show(
        "",
        {"letter": found, "value": text, "problem": problem},
        controls="letter_edit.html",
        title=_("Edit and replay"),
    )


def _editable(letter: DeadLetter) -> tuple[str, str]:
    """Return the payload as JSON to be edited, or the reason why it cannot be edited.

    The edited text replaces the whole payload. Secrets are replaced by a mark, and restored later.
    An unreadable payload is returned unchanged, to be repaired.
    """
    raw = bytes(letter.value or b"")
    if is_internal(letter.handler):
        return "", _("An internal job cannot be edited.")
    if len(raw) > LONGEST_SHOWN:
        return "", _("It is too long to be edited here: %d bytes.") % len(raw)
    try:
        value = _serializer_of(letter).loads(raw)
    except PausableError as error:
        return "", str(error)
    except MessageError:
        return inert_json(raw.decode("utf-8", "replace")), ""
    if not _is_json(value):
        return "", _("It holds what JSON cannot write, and cannot be edited here.")
    shown = json.dumps(redaction.shown_value(letter), indent=2, ensure_ascii=False)
    return inert_json(shown), ""


def _written(letter: DeadLetter, text: str) -> bytes:
    """Return edited JSON in the dead letter's content type.

    :raises MessageError: it is not JSON.
    """
    serializer, data = _serializer_of(letter), text.encode()
    return data if serializer is JSON else serializer.dumps(JSON.loads(data))


def _serializer_of(letter: DeadLetter) -> Serializer:
    return serializer_for(letter.content_type or JSON.content_type)


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError, RecursionError):
        return False


SCREENS = (
    Screen(
        "dead_letters",
        "dead-letters/",
        show_groups,
        "view_deadletter",
        title=gettext_lazy("Dead letters"),
        model="deadletter",
    ),
    Screen("letters", "dead-letters/all/", show_letters, "view_deadletter", model="deadletter"),
    Screen(
        "letter",
        "dead-letters/<uuid:letter>/",
        show_one,
        "view_deadletter",
        model="deadletter",
    ),
    Screen("letter_edit", "dead-letters/<uuid:letter>/edit/", edit, "edit_payload"),
)
