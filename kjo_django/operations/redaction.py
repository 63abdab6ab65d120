"""Redaction: passwords, tokens and the fields that a handler names are shown to nobody.

``restored`` puts the hidden values back into a value that was edited without them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from django.db.models import Model, OuterRef, Subquery
from django.utils.translation import gettext_noop as _

from kjo_django import registry
from kjo_django.conf import get_settings
from kjo_django.exceptions import KjoError
from kjo_django.messages import headers as names
from kjo_django.messages.serializers import JSON, load_result, load_value, serializer_for
from kjo_django.models import DeadLetter, Job, JobFailure, Worker, Workflow
from kjo_django.refusals import RefusedError, Wording
from kjo_django.runtime import jobs_database

REDACTED = "[redacted]"
LONGEST_SHOWN = 100_000
"""Bytes; a longer value is not decoded to be shown to people."""
DEEPEST = 100
"""Levels of nesting; a deeper value is not shown at all."""


def redacted(value: Any, *, also: Iterable[str] = ()) -> Any:
    """Return a decoded payload or result with the values of secret fields replaced.

    A field is secret if its name contains one of ``KJO['REDACT']`` or of ``also``. Case, ``-`` and
    ``_`` do not matter. So is the value of an object with such a name beside it
    (``{"name": "password", "value": …}``). A text that is JSON is redacted, too. Secrets with other
    names, or in other texts (a URL, a form), are not found.
    """
    return _redacted(value, _names(also), 0)


def is_redacted(field: str, *, also: Iterable[str] = ()) -> bool:
    """Whether a field of this name is secret."""
    return _is_secret(field, _names(also))


def _names(also: Iterable[str]) -> list[str]:
    return [each.lower() for each in (*get_settings().redact, *also)]


def _redacted(value: Any, names: list[str], depth: int) -> Any:
    if depth > DEEPEST:
        return REDACTED
    if isinstance(value, dict):
        return _redacted_object(value, names, depth)
    if isinstance(value, (list, tuple)):
        return [_redacted(each, names, depth + 1) for each in value]
    return _redacted_text(value, names, depth) if isinstance(value, str) else value


def _redacted_object(value: dict[Any, Any], names: list[str], depth: int) -> dict[Any, Any]:
    named = (each for key, each in value.items() if str(key).lower() in _NAMES)
    is_pair = any(isinstance(each, str) and _is_secret(each, names) for each in named)
    hidden = _VALUES if is_pair else ()
    shown = {}
    for key, each in value.items():
        is_hidden = str(key).lower() in hidden or _is_secret(key, names)
        shown[key] = REDACTED if is_hidden else _redacted(each, names, depth + 1)
    return shown


def _redacted_text(value: str, names: list[str], depth: int) -> str:
    try:
        inner = _inner(value)
    except RecursionError:
        return REDACTED
    shown = None if inner is None else _redacted(inner, names, depth + 1)
    return json.dumps(shown, ensure_ascii=False) if is_marked(shown) else value


_NAMES = ("name", "key", "field", "header")
"""Names of the fields of a pair: of the field with the name, and of the field with the value."""
_VALUES = ("value", "values")
_OPENING = ("{", "[")


def _inner(text: str) -> Any:
    """Return the object or list of a text that is JSON, else None.

    :raises RecursionError: it is nested too deeply.
    """
    if text.lstrip()[:1] not in _OPENING:
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None


_SHORT = 4
"""Letters. A name of so few would be found where two words meet: dsn in friends_name."""


def _is_secret(key: Any, names: list[str]) -> bool:
    lowered = str(key).lower()
    squeezed = _squeezed(lowered)
    return any(
        name in (_AUTHOR.sub("", lowered) if name == "auth" else lowered)
        or (len(name) > _SHORT and _squeezed(name) in squeezed)
        for name in names
    )


_AUTHOR = re.compile("author(?!i[sz])")
"""The word author contains auth and is no secret."""


def _squeezed(name: str) -> str:
    return name.replace("-", "").replace("_", "")


# --- Payloads, results and headers of rows --------------------------------------------------------


def shown_payload(job: Job, *, longest: int = LONGEST_SHOWN) -> Any:
    """Return a job's payload decoded, redacted and ready for JSON.

    For one that cannot be decoded or has more than ``longest`` bytes, return a text that says so.
    """
    kind = job.content_type
    return _shown(bytes(job.payload), lambda data: load_value(data, kind), job, longest)


def shown_result(job: Job, *, longest: int = LONGEST_SHOWN) -> Any:
    """Return a job's result decoded, redacted and ready for JSON; None if there is none."""
    if job.result is None:
        return None
    kind = job.content_type
    return _shown(
        bytes(job.result), lambda data: load_result(data, serializer_for(kind)), job, longest
    )


def shown_headers(job: Job) -> dict[str, Any]:
    """Return the headers of a job's row, redacted."""
    headers: dict[str, Any] = redacted(job.headers or {})
    # It repeats headers, and the secret ones among them are not redacted.
    headers.pop(names.HEADER_LIST, None)
    return headers


def shown_value(letter: DeadLetter, *, longest: int = LONGEST_SHOWN) -> Any:
    """Return a dead letter's value decoded, redacted and ready for JSON; None if there is none."""
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
        # A value that JSON does not have is described by a text.
        text = json.dumps(value, default=as_text, skipkeys=True, ensure_ascii=False)
        return json.loads(text.encode("utf-8", "replace"), parse_constant=str)
    except (KjoError, LookupError, TypeError, ValueError, RecursionError) as error:
        return f"<{len(data):,} bytes: {error}>"


def hidden_by(handler: str) -> tuple[str, ...]:
    """Return the fields that a handler hides, beside those of the settings.

    A handler that is not registered may have been renamed: then the fields of all handlers are
    hidden.
    """
    found = registry.find(handler)
    if found is not None:
        return found.options.redact
    return tuple({name for each in registry.handlers() for name in each.options.redact})


# --- Other texts of rows --------------------------------------------------------------------------


def hide_texts(rows: Iterable[Model]) -> None:
    """Remove texts that may quote a payload from rows that are shown and not saved.

    They are the key and the unique id of a job, the unique id and the reason of a workflow, and the
    text of an error. A job's error becomes the
    type of the error of its latest attempt.
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
        elif isinstance(row, Workflow):
            row.unique_id, row.reason = None, ""
    if not failed:
        return
    # Not MAX(id): PostgreSQL has none of UUIDs before its version 18.
    newest = JobFailure.objects.filter(job_id=OuterRef("pk")).order_by("-pk")
    jobs = Job.objects.using(jobs_database()).filter(pk__in=[job.pk for job in failed])
    types = dict(jobs.values_list("pk", Subquery(newest.values("error_type")[:1])))
    for job in failed:
        job.error = types.get(job.pk) or REDACTED


# --- Edited values --------------------------------------------------------------------------------


_MISSING: Any = object()
"""Stands for an original that is not there."""


def is_marked(value: Any) -> bool:
    """Whether a value contains ``[redacted]``."""
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
    """Return an edited value with every ``[redacted]`` replaced by the original's value.

    Fields are matched by name, items of a list by position.

    :raises ValueError: the original has no value there, or a list with hidden values has become
        longer or shorter, so that its items cannot be matched.
    """
    return _restored(edited, original, "")


def _restored(edited: Any, original: Any, path: str) -> Any:
    if isinstance(edited, dict):
        known = original if isinstance(original, dict) else {}
        prefix = f"{path}." if path else ""
        return {
            key: _restored(each, known.get(key, _MISSING), f"{prefix}{key}")
            for key, each in edited.items()
        }
    if not is_marked(edited):
        return edited
    if isinstance(edited, (list, tuple)):
        return _restored_list(edited, original, path)
    if edited != REDACTED:
        return _restored_text(edited, original, path)
    if original is _MISSING:
        text = _("%(path)s is %(mark)s, but nothing was hidden there; write the value itself")
        raise RefusedError(text, path=path or Wording(_("the value")), mark=REDACTED)
    return original


def _restored_list(edited: Sequence[Any], original: Any, path: str) -> list[Any]:
    known_items = original if isinstance(original, (list, tuple)) else []
    if len(known_items) != len(edited):
        text = _(
            "%(path)s had %(before)s items and now has %(now)s: which hidden value belongs to "
            "which cannot be told; write the values themselves"
        )
        name = path or Wording(_("the value"))
        raise RefusedError(text, path=name, before=len(known_items), now=len(edited))
    return [
        _restored(each, known, f"{path}[{place}]")
        for place, (each, known) in enumerate(zip(edited, known_items, strict=True))
    ]


def _restored_text(edited: str, original: Any, path: str) -> str:
    """Return an edited text that is JSON, restored."""
    inner = _inner_or_none(original) if isinstance(original, str) else None
    value = _restored(_inner(edited), _MISSING if inner is None else inner, path)
    if value == inner:
        return str(original)  # with its own spaces
    return json.dumps(value, ensure_ascii=False)
