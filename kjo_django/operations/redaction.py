"""Fields nobody is shown: passwords, tokens, and what a job names itself.

What was hidden can come back from an editor who never saw it: ``restored`` puts it in again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any, Final

from django.db.models import Max, Model

from kjo_django import registry
from kjo_django.conf import get_settings
from kjo_django.exceptions import MessageError
from kjo_django.messages import headers as names
from kjo_django.messages.serializers import JSON, load_result, load_value, serializer_for
from kjo_django.models import DeadLetter, Job, JobFailure, Worker
from kjo_django.runtime import jobs_database

REDACTED = "[redacted]"
LONGEST_SHOWN = 100_000
"""Bytes; what is longer is not decoded to be shown to people."""
DEEPEST = 100
"""Levels looked into; what lies deeper is not shown at all."""


def redacted(value: Any, *, also: Iterable[str] = ()) -> Any:
    """Return a decoded payload or result with the values of secret fields replaced.

    A field is secret if its name contains one of ``KJO['REDACT']`` or of ``also``, in any case and
    whatever ``-`` and ``_`` stand in either. So is the value of an object that gives such a name
    beside it (``{"name": "password", "value": …}``), and a text that is JSON is looked into.
    Secrets that are named otherwise, or in other texts (a URL, a form), are not found.
    """
    return _redacted(value, _names(also), 0)


def is_redacted(field: str, *, also: Iterable[str] = ()) -> bool:
    """Whether nobody is shown a field of this name."""
    return _is_secret(field, _names(also))


def _names(also: Iterable[str]) -> list[str]:
    return [each.lower() for each in (*get_settings().redact, *also)]


def _redacted(value: Any, names: list[str], depth: int) -> Any:
    if depth > DEEPEST:
        return REDACTED
    if isinstance(value, dict):
        is_pair = any(
            isinstance(each, str) and _is_secret(each, names)
            for key, each in value.items()
            if str(key).lower() in _NAMES
        )
        return {
            key: REDACTED
            if _is_secret(key, names) or (is_pair and str(key).lower() in _VALUES)
            else _redacted(each, names, depth + 1)
            for key, each in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_redacted(each, names, depth + 1) for each in value]
    if not isinstance(value, str):
        return value
    try:
        inner = _inner(value)
    except RecursionError:
        return REDACTED
    shown = None if inner is None else _redacted(inner, names, depth + 1)
    return json.dumps(shown, ensure_ascii=False) if is_marked(shown) else value


_NAMES = ("name", "key", "field", "header")
"""What the fields of a pair are called: that which names a value, and the value."""
_VALUES = ("value", "values")
_OPENING = ("{", "[")


def _inner(text: str) -> Any:
    """Return the value of a text that is JSON of an object or a list, else None.

    :raises RecursionError: it is nested too deeply.
    """
    if text.lstrip()[:1] not in _OPENING:
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None


_SHORT = 4
"""Letters of a name that would be found by chance where two words meet: dsn in friends_name."""


def _is_secret(key: Any, names: list[str]) -> bool:
    lowered = str(key).lower()
    squeezed = _squeezed(lowered)
    return any(
        name in (_AUTHOR.sub("", lowered) if name == "auth" else lowered)
        or (len(name) > _SHORT and _squeezed(name) in squeezed)
        for name in names
    )


_AUTHOR = re.compile("author(?!i[sz])")
"""Has auth in it and is nobody's secret."""


def _squeezed(name: str) -> str:
    return name.replace("-", "").replace("_", "")


# --- What is shown of rows ------------------------------------------------------------------------


def shown_payload(job: Job, *, longest: int = LONGEST_SHOWN) -> Any:
    """Return a job's payload as anybody may be shown it: decoded, redacted, ready for JSON.

    What cannot be decoded, or has more than ``longest`` bytes, is shown as text that says so.
    """
    kind = job.content_type
    return _shown(bytes(job.payload), lambda data: load_value(data, kind), job, longest)


def shown_result(job: Job, *, longest: int = LONGEST_SHOWN) -> Any:
    """Return a job's result in the same way; None for none."""
    if job.result is None:
        return None
    kind = job.content_type
    return _shown(
        bytes(job.result), lambda data: load_result(data, serializer_for(kind)), job, longest
    )


def shown_headers(job: Job) -> dict[str, Any]:
    """Return what is sent along with a job, in the same way."""
    headers: dict[str, Any] = redacted(job.headers or {})
    # What it repeats of headers that are secret is not redacted.
    headers.pop(names.HEADER_LIST, None)
    return headers


def shown_value(letter: DeadLetter, *, longest: int = LONGEST_SHOWN) -> Any:
    """Return a dead letter's value in the same way; None for a record without one."""
    if letter.value is None:
        return None
    kind = letter.content_type or JSON.content_type
    return _shown(
        bytes(letter.value), lambda data: serializer_for(kind).loads(data), letter, longest
    )


def _shown(data: bytes, decode: Callable[[bytes], Any], row: Job | DeadLetter, longest: int) -> Any:
    def as_text(value: Any) -> str:
        return f"<{len(value):,} bytes>" if isinstance(value, (bytes, bytearray)) else str(value)

    if len(data) > longest:
        return f"<{len(data):,} bytes: too long to be shown>"
    try:
        value = redacted(decode(data), also=hidden_by(row.handler))
        # What other serializers than JSON's hold beside it is described.
        text = json.dumps(value, default=as_text, skipkeys=True, ensure_ascii=False)
        return json.loads(text.encode("utf-8", "replace"), parse_constant=str)
    except (MessageError, LookupError, TypeError, ValueError, RecursionError) as error:
        return f"<{len(data):,} bytes: {error}>"


def hidden_by(handler: str) -> tuple[str, ...]:
    """Return the fields a handler hides beside those of the settings.

    One that is not registered here may have been renamed, and what it hid is nowhere else: what any
    handler hides is hidden then.
    """
    found = registry.find(handler)
    if found is not None:
        return found.options.redact
    return tuple({name for each in registry.handlers() for name in each.options.redact})


# --- What rows hold beside their payload ----------------------------------------------------------


def hide_texts(rows: Iterable[Model]) -> None:
    """Take from rows that are shown, and not saved, what may quote a payload: for who may not see
    those.

    Of a job its key and unique id, and its error becomes the type of the latest attempt's; of a
    failed attempt, a dead letter and a worker, the error's text. Types are columns of their own.
    """
    failed: list[Job] = []
    for row in rows:
        if isinstance(row, Job):
            row.key, row.unique_id = "", None
            if row.error:
                failed.append(row)
        elif isinstance(row, JobFailure | DeadLetter):
            row.error = ""
        elif isinstance(row, Worker):
            row.last_error = ""
    if not failed:
        return
    failures = JobFailure.objects.using(jobs_database())
    of_failed = failures.filter(job_id__in=[job.pk for job in failed]).order_by()
    newest = of_failed.values("job_id").annotate(last=Max("pk")).values_list("last", flat=True)
    types = dict(failures.filter(pk__in=list(newest)).values_list("job_id", "error_type"))
    for job in failed:
        job.error = types.get(job.pk) or REDACTED


# --- What comes back ------------------------------------------------------------------------------


class _Missing:
    """There is no original."""


_MISSING: Final = _Missing()


def is_marked(value: Any) -> bool:
    """Whether anything in a value stands for what was not shown."""
    if isinstance(value, dict):
        return any(is_marked(each) for each in value.values())
    if isinstance(value, (list, tuple)):
        return any(is_marked(each) for each in value)
    if not isinstance(value, str):
        return False
    return value == REDACTED or (REDACTED in value and is_marked(_inner_or_none(value)))


def _inner_or_none(text: str) -> Any:
    try:
        return _inner(text)
    except RecursionError:
        return None


def restored(edited: Any, original: Any = _MISSING) -> Any:
    """Return an edited value with every ``[redacted]`` replaced by what the original has there.

    Fields are found by their name, items of a list by their place.

    :raises ValueError: the original has nothing in that place, or a list that holds hidden values
        has become longer or shorter, so that nobody can tell which belongs to which.
    """
    return _restored(edited, original, "")


def _restored(edited: Any, original: Any, path: str) -> Any:
    if isinstance(edited, str) and edited == REDACTED:
        if isinstance(original, _Missing):
            where = path or "the value"
            raise ValueError(
                f"{where} is {REDACTED}, but nothing was hidden there; write the value itself"
            )
        return original
    if isinstance(edited, str) and is_marked(edited):
        return _restored_text(edited, original, path)
    if isinstance(edited, dict):
        known = original if isinstance(original, dict) else {}
        return {
            key: _restored(each, known.get(key, _MISSING), f"{path}.{key}" if path else str(key))
            for key, each in edited.items()
        }
    if isinstance(edited, list) and is_marked(edited):
        known_items = original if isinstance(original, (list, tuple)) else []
        if len(known_items) != len(edited):
            where = path or "the value"
            raise ValueError(
                f"{where} had {len(known_items)} items and now has {len(edited)}: which hidden "
                "value belongs to which cannot be told; write the values themselves"
            )
        return [
            _restored(each, known, f"{path}[{place}]")
            for place, (each, known) in enumerate(zip(edited, known_items, strict=True))
        ]
    return edited


def _restored_text(edited: str, original: Any, path: str) -> str:
    """Do so within a text that is JSON."""
    inner = _inner_or_none(original) if isinstance(original, str) else None
    value = _restored(_inner(edited), _MISSING if inner is None else inner, path)
    if value == inner:
        return str(original)  # in the very spaces it had
    return json.dumps(value, ensure_ascii=False)
