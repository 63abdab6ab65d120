"""Search for jobs among millions, newest first, within a bounded time.

An index serves ids, a unique id, a time of creation, and every state but completed: such a search
is exact. Other conditions apply to the newest 100,000 rows that the index gives, and the page says
so. The database cannot read payloads: their values are compared in the newest 2,000 rows that fit
the other conditions.
"""

from __future__ import annotations

import difflib
import functools
import heapq
import itertools
import operator
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, time, timedelta
from typing import Any
from uuid import UUID

from django.db.models import Count, F, Q, QuerySet
from django.db.models.functions import Length
from django.utils import timezone
from django.utils.dateparse import parse_date, parse_datetime
from django.utils.translation import gettext_noop as _

from kjo_django import registry
from kjo_django.clock import CLOCK
from kjo_django.conf import get_settings
from kjo_django.enqueue.job_status import living
from kjo_django.exceptions import CoordinationError, PublishError
from kjo_django.ids import uuid7_floor
from kjo_django.messages.serializers import storable_text
from kjo_django.models import Job, WorkflowStage, is_scheduled
from kjo_django.operations.redaction import hidden_by, is_marked, is_redacted, redacted
from kjo_django.operations.rows import batched, key_of
from kjo_django.refusals import RefusedError, Wording
from kjo_django.retries import LONGEST_DELAY
from kjo_django.runtime import get_coordination, get_transport, jobs_database, transport_class
from kjo_django.states import OPEN, JobState, JobStatus
from kjo_django.store.counting import COUNT_LIMIT, window_floor
from kjo_django.transports.base import Transport

MAX_LENGTH = 40_000
"""Characters of a search."""
MAX_IDS = 1000
MAX_WORDS = 100
"""Each is a condition; SQLite refuses a thousand."""
NEEDS_PAYLOADS = _(
    "To search payloads, keys, unique ids and error texts takes the permission to see payloads."
)
_UNITS = {"w": 604_800, "d": 86_400, "h": 3600, "m": 60, "s": 1}

Moment = datetime | timedelta
"""A time, or how long ago."""


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Which jobs. A field that is None or empty does not restrict.

    A text that ends in ``*`` is the beginning of a value.
    """

    ids: tuple[UUID, ...] = ()
    state: str | None = None
    """The shown state, which may be ``scheduled`` or ``processing``."""
    queue: str | None = None
    handler: str | None = None
    key: str | None = None
    unique_id: str | None = None
    error: str | None = None
    """Part of the latest error's text; case does not matter."""
    attempts: int | None = None
    """At least so many attempts were made."""
    since: Moment | None = None
    """Created then or later."""
    until: Moment | None = None
    """Created earlier."""
    workflow: UUID | None = None
    """Steps of this workflow."""
    stage: UUID | None = None
    """Steps of this stage of a workflow."""
    arguments: tuple[tuple[str, str], ...] = ()
    """Paths into the payload, such as ``order.id``, and the values there."""
    words: tuple[str, ...] = ()
    """Each is the id, unique id or key, or part of the handler's name or of the error."""

    is_limited: bool = field(default=False, compare=False)
    """Whether words are compared with ids and names of handlers only."""

    def limited(self) -> JobFilter:
        """Return the filter for users who may not see payloads.

        :raises ValueError: it asks for values of payloads, or for texts that may quote them.
        """
        asked = [name for name in ("key", "unique_id", "error") if getattr(self, name) is not None]
        if asked or self.arguments:
            raise RefusedError(NEEDS_PAYLOADS)
        return replace(self, is_limited=True)

    @property
    def is_empty(self) -> bool:
        """Whether it restricts nothing."""
        return self == JobFilter()

    def __str__(self) -> str:
        parts = [",".join(map(str, self.ids))] if self.ids else []
        parts = [f"id:{part}" for part in parts]
        for name, attribute in _SIMPLE.items():
            value = getattr(self, attribute)
            if value is not None:
                parts.append(f"{name}:{quoted(_text_of(value))}")
        parts += [f"args.{path}:{quoted(value)}" for path, value in self.arguments]
        parts += [quoted(word, is_word=True) for word in self.words]
        return " ".join(parts)

    def at(self, now: datetime) -> JobFilter:
        """Return the filter with times in place of durations before ``now``."""
        return replace(
            self,
            since=now - self.since if isinstance(self.since, timedelta) else self.since,
            until=now - self.until if isinstance(self.until, timedelta) else self.until,
        )


def parse(text: str) -> JobFilter:
    """Return the filter of a search's text.

    :raises ValueError: the text is no search; the message says why and suggests a correction.
    """
    if len(text) > MAX_LENGTH:
        raise RefusedError(_("A search has at most %(most)s characters"), most=MAX_LENGTH)
    if storable_text(text) != text:
        raise RefusedError(_("The search holds a character that no database keeps"))
    found: dict[str, Any] = {}
    arguments: list[tuple[str, str]] = []
    words: list[str] = []
    for qualifier, value in _tokens(text):
        if qualifier is None:
            words.append(value)
        elif qualifier.startswith("args."):
            arguments.append((_path(qualifier.removeprefix("args.")), value))
        else:
            name = _QUALIFIERS.get(_ALIASES.get(qualifier, qualifier))
            if name is None:
                raise _unknown(qualifier)
            if name in found:
                raise RefusedError(_("%(name)s: is given twice"), name=qualifier)
            found[name] = _CONVERT.get(name, _some_text)(qualifier, value)
    if len(words) + len(arguments) > MAX_WORDS:
        raise RefusedError(_("A search has at most %(most)s words and args."), most=MAX_WORDS)
    return JobFilter(**found, arguments=tuple(arguments), words=tuple(words))


# --- Reading --------------------------------------------------------------------------------------

_ALIASES = {"task": "handler", "status": "state", "unique_id": "unique"}
_SIMPLE = {
    name: "unique_id" if name == "unique" else name
    for name in (
        *("state", "queue", "handler", "key", "unique"),
        *("error", "attempts", "since", "until", "workflow", "stage"),
    )
}
_QUALIFIERS = {"id": "ids", **_SIMPLE}
_VALUE = r'"(?:[^"\\]|\\.)*"|[^\s"]+'
_TOKEN = re.compile(rf"\s*(?:(?P<name>[A-Za-z_][\w.-]*):(?P<value>{_VALUE})?|(?P<word>{_VALUE}))")
_AGO = re.compile(r"(\d{1,9})([wdhms])")


def _tokens(text: str) -> list[tuple[str | None, str]]:
    tokens: list[tuple[str | None, str]] = []
    place, text = 0, text.rstrip()
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None or (match.end() < len(text) and not text[match.end()].isspace()):
            remainder = text[place:].strip()
            raise RefusedError(
                _("A quote is not closed, or text follows it: %(text)s"), text=remainder
            )
        name, value, word = match["name"], match["value"], match["word"]
        if name is not None and value is None:
            raise RefusedError(_("%(name)s: needs a value, without a space before it"), name=name)
        text_of = value if name is not None else word
        if text_of.startswith('"'):
            text_of = re.sub(r"\\(.)", r"\1", text_of[1:-1], flags=re.DOTALL)
        tokens.append((name, text_of))
        place = match.end()
    return tokens


def _unknown(qualifier: str) -> RefusedError:
    known = [*_QUALIFIERS, "args."]
    close = difflib.get_close_matches(qualifier, known, n=1)
    hint = Wording(_("known are %(names)s."), {"names": f"{', '.join(known)}<name>"})
    if close:
        hint = Wording(_("did you mean %(name)s?"), {"name": f"{close[0]}:"})
    text = _("There is no %(name)s: to search by; %(hint)s To look for the text itself, quote it.")
    return RefusedError(text, name=qualifier, hint=hint)


def _some_text(qualifier: str, value: str) -> str:
    if not value or len(value) > 255:
        raise RefusedError(_("%(name)s: takes text of 1 to 255 characters"), name=qualifier)
    return value


def _state(qualifier: str, value: str) -> str:
    if value not in JobStatus.values:
        close = difflib.get_close_matches(value, JobStatus.values, n=1)
        hint = Wording(_("there are %(names)s."), {"names": ", ".join(JobStatus.values)})
        if close:
            hint = Wording(_("did you mean %(name)s?"), {"name": close[0]})
        raise RefusedError(_("%(value).80r is not a state; %(hint)s"), value=value, hint=hint)
    return str(value)


def _ids(qualifier: str, value: str) -> tuple[UUID, ...]:
    parts = value.split(",")
    if len(parts) > MAX_IDS:
        raise RefusedError(_("id: takes at most %(most)s ids"), most=MAX_IDS)
    try:
        return tuple(UUID(part) for part in parts)
    except ValueError:
        raise RefusedError(_("id: takes ids of jobs, not %(value).80r"), value=value) from None


def _id(qualifier: str, value: str) -> UUID:
    try:
        return UUID(value)
    except ValueError:
        text = _("%(name)s: takes an id, not %(value).80r")
        raise RefusedError(text, name=qualifier, value=value) from None


def _attempts(qualifier: str, value: str) -> int:
    if not value.isascii() or not value.isdigit() or len(value) > 9:
        raise RefusedError(_("attempts: takes a whole number, not %(value).80r"), value=value)
    return int(value)


def _moment(qualifier: str, value: str) -> Moment:
    ago = _AGO.fullmatch(value)
    if ago is not None and (span := int(ago[1]) * _UNITS[ago[2]]) <= LONGEST_DELAY.total_seconds():
        return timedelta(seconds=span)
    try:
        moment = parse_datetime(value)
        day = parse_date(value) if moment is None else None
    except ValueError:
        moment = day = None
    if day is not None:
        moment = datetime.combine(day, time())
    if moment is None or not 1970 < moment.year < 9000:
        text = _(
            "%(name)s: takes a time such as 2026-01-31, 2026-01-31T12:00 or 2h, not %(value).80r"
        )
        raise RefusedError(text, name=qualifier, value=value)
    return timezone.make_aware(moment) if timezone.is_naive(moment) else moment


def _path(path: str) -> str:
    if any(is_redacted(part) for part in path.split(".")):
        raise RefusedError(_("%(name)s is a secret; it is not searched"), name=f"args.{path}")
    if not all(path.split(".")):
        raise RefusedError(_("args. takes the name of a field, such as args.order_id:17"))
    return path


_CONVERT: dict[str, Callable[[str, str], Any]] = {
    "ids": _ids,
    "state": _state,
    "attempts": _attempts,
    "since": _moment,
    "until": _moment,
    "workflow": _id,
    "stage": _id,
}


# --- Writing --------------------------------------------------------------------------------------


def _text_of(value: Any) -> str:
    if isinstance(value, timedelta):
        seconds = int(value.total_seconds())
        unit = next(unit for unit, size in _UNITS.items() if seconds % size == 0)
        return f"{seconds // _UNITS[unit]}{unit}"
    return value.isoformat() if isinstance(value, datetime) else str(value)


def quoted(text: str, *, is_word: bool = False) -> str:
    """Return a value as it is written in a search.

    :param is_word: it is no value of a name, so a colon in it would make one of it.
    """
    is_plain = text and not re.search(r'[\s"]', text) and not (is_word and ":" in text)
    return text if is_plain else '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


WINDOW = COUNT_LIMIT
"""Rows that a condition without an index is applied to."""
PAYLOADS = 2000
"""Rows whose payload is read."""
LARGEST_PAYLOAD = 64_000
"""Bytes; longer payloads are not read."""
PROCESSING = 2000
"""Most running jobs that are found."""
MAX_PAGE = 500


@dataclass(frozen=True, slots=True)
class KeysetPage:
    """A page of jobs, the newest first."""

    rows: list[Job]
    """Without payloads and results."""
    next: str | None
    """``after`` of the page of older jobs; None at the end."""
    previous: str | None
    """``before`` of the page of newer jobs; None at the beginning."""
    is_windowed: bool
    """Whether older jobs were not read, which may fit as well."""


def page(
    filter: JobFilter | None = None,
    *,
    after: str | None = None,
    before: str | None = None,
    size: int = 50,
) -> KeysetPage:
    """Return a page of the jobs that fit the filter, the newest first.

    :param after: ``next`` of another page.
    :param before: ``previous`` of another page; not with ``after``.
    :param size: rows, at most 500.
    :raises ValueError: a cursor is of no page.
    """
    _check_page(after, before, size)
    found_by_index, is_windowed = _branches(filter or JobFilter())
    branches = [rows.defer("payload", "result") for rows in found_by_index]
    if before is not None:
        edge = _key(before)
        found = _merged([rows.filter(pk__gt=edge).order_by("pk") for rows in branches], size + 1)
        rows, has_older, has_newer = found[:size][::-1], bool(found), len(found) > size
    else:
        if after is not None:
            edge = _key(after)
            branches = [rows.filter(pk__lt=edge) for rows in branches]
        found = _merged([rows.order_by("-pk") for rows in branches], size + 1, newest_first=True)
        rows, has_older, has_newer = found[:size], len(found) > size, after is not None
    return KeysetPage(
        rows,
        next=str(rows[-1].pk) if rows and has_older else None,
        previous=str(rows[0].pk) if rows and has_newer else None,
        is_windowed=is_windowed,
    )


def _check_page(after: str | None, before: str | None, size: int) -> None:
    if after is not None and before is not None:
        raise RefusedError(_("Give after or before, not both"))
    if not 1 <= size <= MAX_PAGE:
        raise RefusedError(_("A page has 1 to %(most)s rows"), most=MAX_PAGE)


def find(filter: JobFilter) -> QuerySet[Job]:
    """Return a query of the jobs that fit, within the bounds of a page, for reading in chunks.

    The bounds are read now: jobs that are created later do not fit.
    """
    return functools.reduce(operator.or_, _branches(filter)[0])


def _branches(given: JobFilter) -> tuple[list[QuerySet[Job]], bool]:
    """Return queries of the jobs that fit, and whether older jobs were not read.

    The queries are disjoint, and each uses an index of its own.
    """
    condition = _without_index(given)
    is_few = given.ids or _exact_unique_id(given) or given.state == JobStatus.PROCESSING
    is_windowed, found = False, []
    for rows, more in _served_by_index(given, CLOCK.now()):
        if (condition & more) and not is_few:
            floor = window_floor(rows, WINDOW)
            if floor is not None:
                is_windowed = True
                rows = rows.filter(pk__gt=floor)
        rows = rows.filter(condition & more)
        if given.arguments:
            rows, has_more = _with_arguments(rows, given.arguments)
            is_windowed |= has_more
        found.append(rows)
    return found, is_windowed


def _exact_unique_id(given: JobFilter) -> str | None:
    return None if given.unique_id is None or given.unique_id.endswith("*") else given.unique_id


def _served_by_index(given: JobFilter, now: datetime) -> list[tuple[QuerySet[Job], Q]]:
    """Return queries that each use an index, with the condition on their rows."""
    rows = Job.objects.using(jobs_database()).all()
    if given.ids:
        rows = rows.filter(pk__in=given.ids)
    for bound, lookup in ((given.since, "pk__gte"), (given.until, "pk__lt")):
        if bound is not None:
            moment = now - bound if isinstance(bound, timedelta) else bound
            rows = rows.filter(**{lookup: uuid7_floor(moment)})
    if given.workflow is not None:
        stages = WorkflowStage.objects.using(jobs_database()).filter(workflow=given.workflow)
        rows = rows.filter(stage__in=stages.values("pk"))
    if given.stage is not None:
        rows = rows.filter(stage=given.stage)
    unique_id = _exact_unique_id(given)
    if unique_id is not None:
        # The index begins with the queue; there are few, so all of them are named.
        queues = [given.queue] if given.queue else [*registry.queue_names()]
        rows = rows.filter(queue__in=queues, unique_id=unique_id)
    return _in_state(rows, given.state, now)


def _in_state(
    rows: QuerySet[Job], state: str | None, now: datetime
) -> list[tuple[QuerySet[Job], Q]]:
    """Return queries of the rows that are shown in a state; see ``_served_by_index``."""
    later = is_scheduled(now)
    if state is None:
        return [(rows, Q())]
    if state == JobStatus.PROCESSING:
        return [(rows.filter(pk__in=running(), state__in=OPEN), Q())]
    if state == JobStatus.COMPLETED:
        return [(rows, Q(state=state))]
    waiting = (JobState.PENDING, JobState.QUEUED)
    if state == JobStatus.SCHEDULED:
        return [(rows.filter(state=stored), later) for stored in waiting]
    return [(rows.filter(state=state), ~later if state in waiting else Q())]


def _without_index(given: JobFilter) -> Q:
    """Return the conditions that no index serves."""
    condition = Q()
    for name in ("queue", "handler", "key", "unique_id"):
        value = getattr(given, name)
        if value is not None and value.endswith("*"):
            condition &= Q(**{f"{name}__startswith": value[:-1]})
        elif value is not None and name != "unique_id":
            condition &= Q(**{name: value})
    if given.error is not None:
        condition &= Q(error__icontains=given.error)
    if given.attempts is not None:
        condition &= Q(attempts__gte=given.attempts)
    for word in given.words:
        found = Q(handler__icontains=word)
        if not given.is_limited:
            found |= Q(error__icontains=word) | Q(key=word) | Q(unique_id=word)
        with suppress(ValueError):
            found |= Q(pk=UUID(word))
        condition &= found
    return condition


def _with_arguments(
    rows: QuerySet[Job], arguments: Sequence[tuple[str, str]]
) -> tuple[QuerySet[Job], bool]:
    """Return the newest rows whose payload has the values, and whether a payload was not read."""
    columns = rows.order_by("-pk").annotate(size=Length(F("payload")))
    sizes = list(columns.values_list("pk", "size")[: PAYLOADS + 1])
    small = [pk for pk, size in sizes[:PAYLOADS] if size <= LARGEST_PAYLOAD]
    fitting: list[UUID] = []
    jobs = Job.objects.using(rows.db).only("handler", "payload", "content_type")
    for keys in batched(small, 500):
        fitting += [job.pk for job in jobs.filter(pk__in=keys) if _has_values(job, arguments)]
    return Job.objects.using(rows.db).filter(pk__in=fitting), len(small) < len(sizes)


def _has_values(job: Job, arguments: Sequence[tuple[str, str]]) -> bool:
    hidden = hidden_by(job.handler)
    # Only shown values are compared: a match would reveal a hidden one.
    value = redacted(job.arguments, also=hidden)
    return all(
        not any(is_redacted(part, also=hidden) for part in path.split("."))
        and any(
            text_of_value(each) == wanted
            for each in values_at(value, path.split("."))
            if not isinstance(each, dict | list) and not is_marked(each)
        )
        for path, wanted in arguments
    )


def running_counts() -> dict[str, int] | None:
    """Return how many jobs of each queue run, as the list of jobs in the state *processing* has
    them, at most 2,000 altogether; None while coordination cannot be reached."""
    if (ids := _leased_ids()) is None:
        return None
    rows = Job.objects.using(jobs_database()).filter(pk__in=ids, state__in=OPEN).order_by()
    return dict(rows.values_list("queue").annotate(Count("pk")))


def running() -> list[UUID]:
    """Return the ids of at most 2,000 jobs that living workers have begun; none while coordination
    or a transport cannot be reached.

    A lease has the name of its message. Messages of other services have no job's id and are not
    found.
    """
    return _leased_ids() or []


def _leased_ids() -> list[UUID] | None:
    prefixes = {get_settings().queue(name).key_prefix for name in registry.queue_names()}
    coordination = get_coordination()
    owners: dict[str, str] = {}
    names: dict[str, str] = {}
    try:
        for transport in _counting_transports():
            owners |= transport.running(most=PROCESSING - len(owners))
        for prefix in sorted(f"CONS:{prefix}:" for prefix in prefixes):
            most = PROCESSING - len(owners) - len(names)
            found = itertools.islice(coordination.names(prefix), most)
            names.update((name, name.removeprefix(prefix)) for name in found)
        held = coordination.holders(list(names)) if names else {}
        owners |= {names[name]: token for name, token in held.items()}
        running = living(owners)
    except (CoordinationError, PublishError):
        return None
    ids = []
    for message_id in running:
        with suppress(ValueError):
            ids.append(UUID(message_id.partition(":")[0]))
    return ids


def _counting_transports() -> list[Transport]:
    """Return the transports of our queues that tell which messages are begun."""
    aliases = {get_settings().queue(name).transport for name in registry.queue_names()}
    counting = (a for a in aliases if transport_class(a).capabilities.counts_deliveries)
    return [get_transport(alias) for alias in sorted(counting)]


def values_at(value: Any, path: Sequence[str]) -> list[Any]:
    """Return the values at a path; a list is entered item by item."""
    found = [value]
    for part in path:
        found = [each for one in found for each in _step(one, part)]
    return [item for one in found for item in (one if isinstance(one, list) else [one])]


def _step(value: Any, part: str) -> list[Any]:
    if isinstance(value, dict):
        return [value[part]] if part in value else []
    if isinstance(value, list):
        if part.isdigit() and part.isascii() and len(part) < 10:
            return value[int(part) : int(part) + 1]
        return [found for item in value if isinstance(item, dict) for found in _step(item, part)]
    return []


def text_of_value(value: Any) -> str:
    """Return a value as it is written in a search."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)


# --- Pages ----------------------------------------------------------------------------------------


def _merged(
    branches: Sequence[QuerySet[Job]], size: int, *, newest_first: bool = False
) -> list[Job]:
    parts = [list(rows[:size]) for rows in branches]
    merged = heapq.merge(*parts, key=lambda job: job.pk, reverse=newest_first)
    return list(itertools.islice(merged, size))


def _key(cursor: str) -> UUID:
    key = key_of(cursor)
    if key is None:
        raise RefusedError(_("%(text).80r is not a place in a list of jobs"), text=cursor)
    return key
