"""Display of untrusted text: escaped, bounded, and without control characters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from django.db.models import F, Model
from django.db.models.functions import Length
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

import kjo_django
from kjo_django.exceptions import KjoError
from kjo_django.messages import headers as names
from kjo_django.messages.serializers import JSON, serializer_for
from kjo_django.models import DeadLetter, Job, JobFailure
from kjo_django.operations import redaction
from kjo_django.operations.safe_text import inert, is_active
from kjo_django.runtime import jobs_database
from kjo_django.schedules.shown import ScheduleState
from kjo_django.states import JobState, JobStatus

MAX_TEXT = 10_000
MAX_BINARY = 2_048
MAX_LISTED = 4_000
"""Bytes; the arguments of a longer payload are not read for a list."""
MAX_ARGUMENT, MAX_ARGUMENTS = 40, 120
"""Characters of one argument, and of all arguments, on one line."""
SCHEDULE_BADGES = {
    ScheduleState.ACTIVE: ("alive", gettext_lazy("Active")),
    ScheduleState.PAUSED: ("paused", gettext_lazy("Paused")),
    ScheduleState.BROKEN: ("failed", gettext_lazy("Broken")),
    ScheduleState.ENDED: ("completed", gettext_lazy("Ended")),
    ScheduleState.DISABLED: ("stopped", gettext_lazy("Disabled")),
}
"""The badge of each state of a schedule."""

TRACEBACK_HEAD = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "(?P<path>[^"]*)", line \d+')
_OURS = "|".join(
    re.escape(each.name)
    for each in sorted(Path(kjo_django.__file__).parent.iterdir())
    if each.name != "__pycache__"
)
_BETWEEN = re.compile(
    rf"[/\\]kjo_django[/\\](?:{_OURS})(?:[/\\]|$)"
    r"|[/\\]python3\.\d+t?[/\\](?!site-packages|dist-packages)"
    r"|[/\\](?:site|dist)-packages[/\\](?:django|asgiref)[/\\]"
)
"""Files of kjo_django and, in its calls, of Python's library and Django."""


def inert_row(row: Model) -> None:
    """Escape the control characters in the texts of a row that is shown and not saved, except in
    its primary key, which is part of addresses.
    """
    for field in row._meta.concrete_fields:
        value = row.__dict__.get(field.attname)
        if isinstance(value, str) and not field.primary_key:
            row.__dict__[field.attname] = inert(value)


def inert_json(text: str) -> str:
    """Escape control characters in a JSON text that is to be edited; its meaning stays."""
    if text.isprintable():
        return text
    return "".join(json.dumps(c)[1:-1] if is_active(c) else c for c in text)


def show_text(text: str) -> SafeString:
    """Return a block of text, cut at a maximum length."""
    shown = inert(text[:MAX_TEXT])
    return format_html("<pre class='kjo-raw'>{}{}</pre>", shown, _more(len(text) - MAX_TEXT))


def traceback_parts(text: str) -> list[tuple[list[str], int]]:
    """Return the parts of a traceback: lines, and the number of frames in them if they are folded,
    or 0. Of each exception the frames before the first of the project's code are folded; where
    there is no other frame, none are."""
    shown: list[str] = []
    parts: list[tuple[list[str], int]] = []
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        shown.append(lines[at])
        at += 1
        if shown[-1] != TRACEBACK_HEAD:
            continue
        frames = list(_frames(lines[at:]))
        count = next(
            (index for index, frame in enumerate(frames) if not _is_between(frame)), len(frames)
        )
        if 0 < count < len(frames):
            folded = [line for frame in frames[:count] for line in frame]
            parts += [(shown, 0), (folded, count)]
            shown = []
            at += len(folded)
    return [*parts, (shown, 0)] if shown else parts


def _frames(lines: Sequence[str]) -> Iterator[list[str]]:
    """Yield the lines of each frame, up to the line of the exception."""
    frame: list[str] = []
    for line in lines:
        if not line.startswith("  "):
            break
        if _FRAME.match(line) and frame:
            yield frame
            frame = []
        frame.append(line)
    if frame:
        yield frame


def _is_between(frame: Sequence[str]) -> bool:
    found = _FRAME.match(frame[0])
    return found is not None and _BETWEEN.search(found["path"]) is not None


def show_traceback(text: str) -> SafeString:
    """Return a traceback whose frames before the project's own code are folded."""
    return format_html_join("", "{}", ((_shown_part(*part),) for part in traceback_parts(text)))


def _shown_part(lines: Sequence[str], folded_count: int) -> SafeString:
    block = show_text("\n".join(lines))
    if not folded_count:
        return block
    words = ngettext("%d frame of kjo_django", "%d frames of kjo_django", folded_count)
    return format_html(
        '<details class="kjo-frames"><summary>{}</summary>{}</details>',
        words % folded_count,
        block,
    )


def show_value(value: Any) -> SafeString:
    """Return a decoded value as indented JSON."""
    if isinstance(value, str):
        return show_text(value)
    try:
        return show_text(json.dumps(value, indent=2, ensure_ascii=False, default=str))
    except (ValueError, RecursionError):
        return show_text(repr(value)[: MAX_TEXT + 1])


def short_arguments(rows: Sequence[Job] | Sequence[DeadLetter]) -> dict[Any, str]:
    """Return the arguments of jobs or dead letters on one line each, shortened and redacted, by the
    row's key. A payload that is too long for a list is an ellipsis.

    It costs one query, for the payloads that are short.
    """
    if not rows:
        return {}
    model = type(rows[0])
    column = "payload" if model is Job else "value"
    show: Any = redaction.shown_payload if model is Job else redaction.shown_value
    of_rows = model.objects.using(jobs_database()).filter(pk__in=[row.pk for row in rows])
    listed = of_rows.annotate(size=Length(column)).filter(size__lte=MAX_LISTED)
    columns = ("handler", "content_type", column)
    found = {row.pk: one_line(show(row)) for row in listed.only(*columns)}
    return {row.pk: found.get(row.pk, "…") for row in rows}


def seconds_taken(rows: Sequence[Job], shown: dict[Any, JobStatus]) -> dict[Any, float]:
    """Return how long the latest attempt of each job ran, by the job's key: of a running job until
    now. Jobs of which it is not known are missing. It costs a query if one has failed.

    :param shown: the state that people are shown, by the job's key.
    """
    now, taken = timezone.now(), dict[Any, float]()
    for row in rows:
        ended = now if shown[row.pk] == JobStatus.PROCESSING else row.finished_at
        if row.state != JobState.FAILED and row.started_at is not None and ended is not None:
            taken[row.pk] = max(0.0, (ended - row.started_at).total_seconds())
    failed = [row.pk for row in rows if row.state in (JobState.FAILED, JobState.FAILING)]
    if failed:
        failures = JobFailure.objects.using(jobs_database()).order_by()
        latest = failures.filter(
            job_id__in=failed, attempt=F("job__attempts"), generation=F("job__generation")
        )
        for key, started_at, failed_at in latest.values_list("job_id", "started_at", "failed_at"):
            if started_at is not None:
                taken[key] = max(0.0, (failed_at - started_at).total_seconds())
    return taken


def one_line(value: Any) -> str:
    """Return decoded arguments as a call has them between its parentheses, shortened."""
    if isinstance(value, dict):
        parts = [f"{_cut(str(name))}={_short_json(each)}" for name, each in value.items()]
    else:
        parts = [] if value is None else [_short_json(value)]
    return _cut(", ".join(parts), MAX_ARGUMENTS)


def _short_json(value: Any) -> str:
    try:
        return _cut(json.dumps(value, ensure_ascii=False, default=str))
    except (ValueError, RecursionError):
        return "…"


def _cut(text: str, most: int = MAX_ARGUMENT) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def show_bytes(data: Any) -> SafeString:
    """Return bytes as text where they are text, else as a hex dump."""
    if data is None:
        return format_html("<span class='kjo-none'>{}</span>", _("none"))
    raw = bytes(data)
    try:
        return show_text(raw.decode())
    except UnicodeDecodeError:
        dump = _hex_dump(raw[:MAX_BINARY])
        return format_html("<pre class='kjo-raw'>{}{}</pre>", dump, _more(len(raw) - MAX_BINARY))


def show_message(letter: DeadLetter) -> SafeString:
    """Return a dead letter's message without its secrets; an unreadable one byte for byte."""
    if letter.value is None:
        return show_bytes(None)
    try:
        serializer_for(letter.content_type or JSON.content_type).loads(bytes(letter.value))
    except (KjoError, LookupError):
        return show_bytes(letter.value)
    return show_value(redaction.shown_value(letter))


def show_headers(headers: dict[str, bytes]) -> SafeString:
    """Return the headers of a message, one per line, without those that are secret."""
    lines = []
    for name, value in sorted(names.listed(headers), key=lambda header: header[0]):
        try:
            shown = redaction.REDACTED if redaction.is_redacted(name) else (value or b"").decode()
        except UnicodeDecodeError:
            shown = f"0x{(value or b'').hex()}"
        lines.append(f"{inert(name)}: {inert(shown)}".replace("\n", "\\n"))
    return show_text("\n".join(lines))


def badge(kind: str, label: object) -> SafeString:
    """Return a state's badge. Its text has the meaning; the colour only helps."""
    return format_html("<span class='kjo-state kjo-{}'>{}</span>", kind, label)


def _more(count: int) -> str:
    if count <= 0:
        return ""
    return "\n… " + ngettext("%d more", "%d more", count) % count


def _hex_dump(data: bytes) -> str:
    lines = []
    for start in range(0, len(data), 16):
        row = data[start : start + 16]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{start:08x}  {row.hex(' '):<47}  {text}")
    return "\n".join(lines)
