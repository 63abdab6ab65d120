"""Deletes or redacts what the tables hold of a person, and says what is left elsewhere.

Every row is read, in the order of its key; ``Person`` says which are the person's. What has ended
is erased in transactions of one chunk each. What has not ended is cancelled first if that is asked
for, and else kept and counted. An interrupted run is begun again: what it has erased is not found
any more.

An internal job does the same for operators. Its payload holds digests, and no personal data.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from django.apps import apps
from django.db import router, transaction
from django.db.models import Q, QuerySet
from django.utils.translation import gettext_noop as _

from kjo_django import registry
from kjo_django.clock import CLOCK
from kjo_django.conf import get_settings
from kjo_django.engine.handler.context import JobContext
from kjo_django.enqueue.definition import JobDefinition
from kjo_django.enqueue.job_status import shown_states
from kjo_django.exceptions import KjoError, MessageError
from kjo_django.logs import get_logger
from kjo_django.messages import headers as names
from kjo_django.messages.serializers import (
    JSON,
    load_result,
    load_value,
    register_serializer,
    serializer_for,
)
from kjo_django.models import (
    ORIGIN_ID,
    DeadLetter,
    DeadLetterState,
    HeldJob,
    Job,
    JobFailure,
    ProcessedEvent,
    Schedule,
    TransportMessage,
    Workflow,
    WorkflowStage,
)
from kjo_django.operations import jobs, search, workflows
from kjo_django.operations.audit import log_entries
from kjo_django.operations.bulk import operations_queue
from kjo_django.operations.internal import Request, actor_of, is_internal, request_of
from kjo_django.operations.rows import CHUNK, batched, key_of, lock, streamed
from kjo_django.personal_data.person import Person
from kjo_django.refusals import RefusedError
from kjo_django.runtime import jobs_database, transport_class
from kjo_django.states import FINAL, OPEN_WORKFLOWS, UNFINISHED

logger = get_logger("kjo_django")

WITH_PAYLOADS = 100
"""Rows that are read at once with their payloads."""
WITHOUT_PAYLOADS = 2000
MAX_REFERENCE = 100
ERASED = "application/x-kjo-erased"
"""The content type of a job whose payload was redacted."""

OPEN_JOBS = "open_jobs"
STEPS = "steps_of_open_workflows"
KEPT_WORKFLOWS = "workflows"
WAITING_MESSAGES = "messages_of_others"
SCHEDULES = "schedules"


class ErasedSerializer:
    """Stands for payloads that were redacted; a job that has one cannot run."""

    content_type = ERASED

    def dumps(self, value: Any) -> bytes:
        """Return a text that stands for every value: an empty message would not be one of ours."""
        return b"redacted"

    def loads(self, data: bytes) -> Any:
        """:raises MessageError: always."""
        raise MessageError("deserialization", "Its payload was redacted: it had personal data")


register_serializer(ErasedSerializer())


class Mode(enum.StrEnum):
    """What becomes of the rows."""

    DELETE = "delete"
    """Jobs and dead letters are deleted, as ``kjo_prune`` would later."""
    REDACT = "redact"
    """Rows stay, with their states and times. Their contents are emptied."""


@dataclasses.dataclass(slots=True)
class Report:
    """What one run has found and erased."""

    is_dry_run: bool
    mode: Mode
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    """Rows by kind; of a dry run, those that would be erased."""
    kept: Counter[str] = dataclasses.field(default_factory=Counter)
    """The person's rows that stay, by reason."""
    unreadable: Counter[str] = dataclasses.field(default_factory=Counter)
    """Rows by kind whose contents could not be read, so that nobody knows whose they are."""
    queues: set[str] = dataclasses.field(default_factory=set)
    """Of the rows found."""

    @property
    def is_complete(self) -> bool:
        """Whether no row is kept that is known to be the person's."""
        return not self.kept

    def as_dict(self) -> dict[str, Any]:
        """Return the report ready for JSON."""
        return {
            "dry_run": self.is_dry_run,
            "mode": str(self.mode),
            "erased": dict(self.counts),
            "kept": dict(self.kept),
            "unreadable": dict(self.unreadable),
            "complete": self.is_complete,
            "left": left(self),
        }


OnRead = Callable[[str, int], None]
"""Called with a kind of rows and how many of them were read."""


def erase(
    person: Person,
    *,
    mode: Mode = Mode.DELETE,
    cancel: bool = False,
    dry_run: bool = False,
    actor: str = "",
    reference: str = "",
    on_read: OnRead = lambda kind, count: None,
) -> Report:
    """Delete or redact what the tables hold of a person, and return a report.

    :param cancel: also cancel the person's open jobs and workflows, ask running jobs to end, and
        delete messages of other services that wait in the database. Without, they are kept and
        counted.
    :param dry_run: change nothing; count what would be erased.
    :param actor: who asked, for the log.
    :param reference: of the request, for the log: a number in your own files, and no name.
    :raises CoordinationError: running jobs cannot be asked to end.
    """
    run = _Run(person, Report(dry_run, Mode(mode)), cancel, actor, on_read)
    run.find_workflows()
    run.find_jobs()
    run.find_letters()
    run.find_messages()
    run.find_events()
    run.find_schedules()
    run.erase_workflows()
    logger.info("%s", summary(run.report, person, actor, reference))
    return run.report


def summary(report: Report, person: Person, actor: str, reference: str) -> str:
    """Return what was done in one sentence that does not say who the person is."""
    done = "Would erase" if report.is_dry_run else "Erased"
    counts = ", ".join(f"{count:,} {kind}" for kind, count in report.counts.items()) or "nothing"
    kept = ", ".join(f"{count:,} {reason}" for reason, count in report.kept.items())
    parts = [f"{done} personal data ({report.mode}), found by {person}: {counts}"]
    parts += [f"kept: {kept}"] if kept else []
    parts += [f"reference {reference[:MAX_REFERENCE]}"] if reference else []
    parts += [f"for {actor}"] if actor else []
    return "; ".join(parts)


def left(report: Report) -> list[str]:
    """Return what is or may be left of the person, beside the rows that were kept."""
    texts, topics = [], set()
    for name in sorted(report.queues):
        queue = get_settings().queue(name)
        # The rows of this transport are in a table that was searched.
        if not transport_class(queue.transport).capabilities.transactional:
            topics |= {*queue.topics, queue.dead_letter_topic}
    if topics:
        texts.append(f"Records in the topics {', '.join(sorted(topics))}, until their retention.")
    if report.unreadable:
        count = sum(report.unreadable.values())
        texts.append(f"The person's among the rows whose contents could not be read ({count:,}).")
    if SCHEDULES in report.kept:
        texts.append("Schedules with these arguments, which go on; edit or delete them.")
    texts += [
        "Ids of messages in processed_events, until RETENTION_PROCESSED_EVENTS: they keep what "
        "was erased from running again.",
        "Keys, ids and progress in leases, limits and marks, until they expire.",
        "The last error that a running worker shows, until its next one or its end.",
        "Logs, traces, error trackers and backups.",
    ]
    return texts


class _Run:
    """One run over all tables."""

    def __init__(
        self, person: Person, report: Report, cancel: bool, actor: str, on_read: OnRead
    ) -> None:
        self.report = report
        self._person = person
        self._cancels = cancel and not report.is_dry_run
        self._actor = actor
        self._on_read = on_read
        self._using = jobs_database()
        self._workflow_keys: list[Any] = []
        self._stages: set[Any] = set()
        """Of workflows that are the person's."""
        self._letters: set[Any] = set()
        """Dead letters that were counted with their jobs."""
        self._erased_jobs: set[str] = set()
        self._kept_jobs: set[str] = set()

    # --- Reading ----------------------------------------------------------------------------------

    def _read(
        self, kind: str, rows: QuerySet[Any], columns: Sequence[str], size: int
    ) -> Iterator[list[dict[str, Any]]]:
        """Yield all rows that there are now, in chunks in the order of their key."""
        rows = rows.using(self._using).order_by("pk")
        last = rows.reverse().values_list("pk", flat=True).first()
        if last is None:
            return
        rows, count = rows.filter(pk__lte=last).values("pk", *columns), 0
        chunk = list(rows[:size])
        while chunk:
            yield chunk
            count += len(chunk)
            self._on_read(kind, count)
            chunk = list(rows.filter(pk__gt=chunk[-1]["pk"])[:size])

    def _has_value(self, kind: str, *loads: Callable[[], Any]) -> bool:
        is_unreadable = False
        for load in loads:
            try:
                if self._person.has_value(load()):
                    return True
            except (KjoError, LookupError, TypeError, ValueError, RecursionError):
                is_unreadable = True
        self._count(self.report.unreadable, kind, int(is_unreadable))
        return False

    # --- Workflows --------------------------------------------------------------------------------

    def find_workflows(self) -> None:
        """Remember the person's workflows and their stages: the steps are found with the jobs."""
        rows = Workflow.objects.exclude(unique_id=None)
        for chunk in self._read("workflows", rows, ("unique_id",), WITHOUT_PAYLOADS):
            ids = ((row["pk"], row["unique_id"]) for row in chunk)
            keys = [key for key, unique_id in ids if self._person.has_id(unique_id, str(key))]
            if not keys:
                continue
            stages = WorkflowStage.objects.using(self._using).filter(workflow__in=keys)
            self._stages.update(stages.values_list("pk", flat=True))
            if self._cancels:
                workflows.cancel(keys, actor=self._actor)
            self._workflow_keys += keys

    def erase_workflows(self) -> None:
        """Erase the unique ids of workflows that have ended.

        That is done after their steps: a run that was interrupted before must find these again.
        """
        for keys in batched(self._workflow_keys, CHUNK):
            steps = Job.objects.using(self._using).filter(stage__workflow__in=keys)
            pairs = streamed(steps.values_list("pk", "stage__workflow"))
            left = {workflow for step, workflow in pairs if str(step) in self._kept_jobs}
            ended = self._workflows(keys).exclude(state__in=OPEN_WORKFLOWS)
            taken = [row.pk for row in ended.only("pk") if row.pk not in left]
            self._add("workflows", len(taken))
            self._keep(KEPT_WORKFLOWS, len(keys) - len(taken))
            if not self.report.is_dry_run:
                self._erase_log_entries("workflow", taken)
                self._workflows(taken).update(unique_id=None, reason="")

    def _workflows(self, keys: Sequence[Any]) -> QuerySet[Workflow]:
        return Workflow.objects.using(self._using).filter(pk__in=keys)

    # --- Jobs -------------------------------------------------------------------------------------

    def find_jobs(self) -> None:
        """Erase jobs with their failures, dead letters and places in line."""
        columns = ["key", "unique_id", "headers", "stage_id", "queue", "handler"]
        if self._person.fields:
            columns += ["payload", "content_type", "result"]
        size = WITH_PAYLOADS if self._person.fields else WITHOUT_PAYLOADS
        for chunk in self._read("jobs", Job.objects.all(), columns, size):
            found = [row for row in chunk if self._is_job(row)]
            self.report.queues.update(row["queue"] for row in found)
            for some in batched([row["pk"] for row in found], CHUNK):
                self._take_jobs(some)

    def _is_job(self, row: dict[str, Any]) -> bool:
        person, headers = self._person, row["headers"] or {}
        ids = (headers.get(ORIGIN_ID), headers.get(names.UNIQUE_ID))
        if person.has_key(row["key"]) or person.has_id(row["unique_id"], str(row["pk"]), *ids):
            return True
        if row["stage_id"] in self._stages:
            return True
        if is_internal(row["handler"]) and self._is_request(row["pk"]):
            return True
        if not person.fields or row["content_type"] == ERASED:
            return False
        kind, payload, result = row["content_type"], bytes(row["payload"]), row["result"]
        loads: list[Callable[[], Any]] = [lambda: load_value(payload, kind)]
        if result is not None:
            loads.append(lambda: load_result(bytes(result), serializer_for(kind)))
        return self._has_value("jobs", *loads)

    def _is_request(self, key: Any) -> bool:
        """Return whether an internal job acts on rows that are searched by what is the person's."""
        with suppress(MessageError, LookupError, TypeError, ValueError):
            stored = Job.objects.using(self._using).values_list("payload", flat=True).get(pk=key)
            given = JSON.loads(bytes(stored))["filter"]
            if isinstance(given, str):
                found = search.parse(given)
                texts = [*found.words, found.key, found.unique_id, found.error]
                texts += [value for _, value in found.arguments]
            else:
                texts = [each for each in given.values() if isinstance(each, str)]
            return any(map(self._person.has_text, texts))
        return False

    def _take_jobs(self, keys: list[Any]) -> None:
        rows = Job.objects.using(self._using).filter(pk__in=keys)
        if self._cancels:
            open_keys = list(rows.filter(state__in=UNFINISHED).values_list("pk", flat=True))
            if open_keys:
                jobs.cancel(open_keys, abort=True, actor=self._actor)
        if self.report.is_dry_run:
            return self._count_jobs(list(rows.only("pk", "state", "stage_id")))
        with transaction.atomic(using=self._using):
            free, busy, _ = jobs.lock_jobs(keys)
            taken = self._ended(free, len(busy))
            self._erase_jobs(taken)
        self._kept_jobs.update(str(key) for key in {job.pk for job in free} | busy)
        self._kept_jobs.difference_update(str(job.pk) for job in taken)
        stages = {job.stage_id for job in taken if job.stage_id is not None}
        if stages:
            # Their reason may quote a step's error.
            ended = Workflow.objects.using(self._using).filter(stages__in=stages)
            ended = ended.exclude(state__in=OPEN_WORKFLOWS).exclude(reason="")
            self._workflows(list(ended.values_list("pk", flat=True))).update(reason="")

    def _ended(self, found: list[Job], busy_count: int) -> list[Job]:
        """Return the jobs that may be erased, and count the others."""
        ended = [job for job in found if job.state in FINAL]
        stages = {job.stage_id for job in ended if job.stage_id is not None}
        needed: set[Any] = set()
        if stages:
            rows = WorkflowStage.objects.using(self._using).filter(pk__in=stages)
            of_open = rows.filter(workflow__state__in=OPEN_WORKFLOWS)
            needed = set(of_open.values_list("pk", flat=True))
        taken = [job for job in ended if job.stage_id not in needed]
        self._keep(OPEN_JOBS, len(found) - len(ended) + busy_count)
        self._keep(STEPS, len(ended) - len(taken))
        return taken

    def _count_jobs(self, found: list[Job]) -> None:
        taken = self._ended(found, 0)
        self._add("jobs", len(taken))
        keys = [job.pk for job in taken]
        self._erased_jobs.update(map(str, keys))
        self._kept_jobs.update(str(job.pk) for job in found)
        self._kept_jobs.difference_update(map(str, keys))
        failures = JobFailure.objects.using(self._using).filter(job__in=keys)
        letters = DeadLetter.objects.using(self._using).filter(job__in=keys)
        self._letters.update(letters.values_list("pk", flat=True))
        self._add("failures", failures.count())
        self._add("dead_letters", letters.count())

    def _erase_jobs(self, taken: list[Job]) -> None:
        keys = [job.pk for job in taken]
        if not keys:
            return
        self._erased_jobs.update(map(str, keys))
        self._erase_log_entries("job", keys)
        rows = Job.objects.using(self._using).filter(pk__in=keys)
        failures = JobFailure.objects.using(self._using).filter(job__in=keys)
        letters = DeadLetter.objects.using(self._using).filter(job__in=keys)
        HeldJob.objects.using(self._using).filter(job_id__in=keys).delete()
        self._add("dead_letters", self._erase_locked_letters(letters))
        if self.report.mode is Mode.DELETE:
            self._add("failures", failures.order_by()._raw_delete(self._using))
            self._add("jobs", rows.order_by()._raw_delete(self._using))
            return
        nothing = dict.fromkeys(("error", "code", "traceback", "log"), "")
        self._add("failures", failures.update(details=None, **nothing))
        texts = {"key": "", "unique_id": None, "result": None, "headers": None, "error": ""}
        self._add("jobs", rows.update(payload=b"redacted", content_type=ERASED, **texts))
        for job in taken:
            origin = (job.headers or {}).get(ORIGIN_ID)
            if origin and not self._person.has_id(origin):
                # A second copy of the message that the job was made of is known by it.
                rows.filter(pk=job.pk).update(headers={ORIGIN_ID: origin})

    def _add(self, kind: str, count: int) -> None:
        self._count(self.report.counts, kind, count)

    def _keep(self, reason: str, count: int) -> None:
        self._count(self.report.kept, reason, count)

    @staticmethod
    def _count(counts: Counter[str], name: str, count: int) -> None:
        if count:
            counts[name] += count

    # --- Dead letters -----------------------------------------------------------------------------

    def find_letters(self) -> None:
        """Erase dead letters that are the person's by themselves."""
        columns = ["key", "message_id", "headers", "queue"]
        if self._person.fields:
            columns += ["value", "content_type"]
        size = WITH_PAYLOADS if self._person.fields else WITHOUT_PAYLOADS
        for chunk in self._read("dead_letters", DeadLetter.objects.all(), columns, size):
            others = [row for row in chunk if row["pk"] not in self._letters]
            found = [row for row in others if self._is_letter(row)]
            self.report.queues.update(row["queue"] for row in found if row["queue"])
            self._erase_letters([row["pk"] for row in found])

    def _is_letter(self, row: dict[str, Any]) -> bool:
        person, headers = self._person, _headers(row["headers"])
        ids = (headers.get(names.UNIQUE_ID), headers.get(names.ID))
        if person.has_key(bytes(row["key"] or b"")) or person.has_id(
            row["message_id"], str(row["pk"]), *ids
        ):
            return True
        return bool(person.fields and row["value"] is not None) and self._has_value(
            "dead_letters",
            lambda: load_value(bytes(row["value"]), row["content_type"] or JSON.content_type),
        )

    def _erase_letters(self, keys: Sequence[Any]) -> None:
        for some in batched(keys, CHUNK):
            if self.report.is_dry_run:
                self._add("dead_letters", len(some))
                continue
            with transaction.atomic(using=self._using):
                rows = DeadLetter.objects.using(self._using)
                locked = [row.pk for row in lock(rows.only("pk", "state"), some)]
                self._add("dead_letters", self._erase_locked_letters(rows.filter(pk__in=locked)))

    def _erase_locked_letters(self, letters: QuerySet[DeadLetter]) -> int:
        found = list(letters.values_list("pk", "message_id"))
        self._erase_log_entries("deadletter", [key for key, _ in found])
        if self.report.mode is Mode.DELETE:
            return int(letters.order_by()._raw_delete(self._using))
        letters.filter(state=DeadLetterState.OPEN).update(
            state=DeadLetterState.DISCARDED, closed_at=CLOCK.now()
        )
        letters.filter(pk__in=[key for key, id in found if self._person.has_id(id)]).update(
            message_id=""
        )
        texts = dict.fromkeys(("error", "traceback", "fingerprint"), "")
        return letters.update(key=None, value=None, headers={}, note="Redacted.", **texts)

    # --- The database transport, events, schedules -----------------------------------------------

    def find_messages(self) -> None:
        """Delete messages that wait in the database: those of erased jobs, also of earlier runs,
        copies of dead letters, and, where open work is cancelled, those of other services."""
        now, rows, own = CLOCK.now(), TransportMessage.objects.all(), _own_groups()
        columns = ("key", "headers", "value", "consumer_group")
        for chunk in self._read("messages", rows, columns, WITH_PAYLOADS):
            gone, waiting = self._sorted_messages(chunk, own)
            if waiting and not self._cancels:
                self._keep(WAITING_MESSAGES, len(waiting))
                waiting = []
            if self.report.is_dry_run:
                self._add("messages", len(gone))
                continue
            messages = TransportMessage.objects.using(self._using)
            self._add("messages", messages.filter(pk__in=gone).delete()[0])
            if waiting:
                free = Q(lease_token="") | Q(lease_expires_at__lt=now)
                count = messages.filter(free, pk__in=waiting).delete()[0]
                self._add("messages", count)
                self._keep(WAITING_MESSAGES, len(waiting) - count)

    def _sorted_messages(
        self, rows: Sequence[dict[str, Any]], own: Container[str]
    ) -> tuple[list[Any], list[Any]]:
        """Return the keys of messages to be deleted, and of those of other services' that wait.

        :param own: this service's consumer groups.
        """
        gone: list[Any] = []
        waiting: list[Any] = []
        pairs = [(row, _headers(row["headers"])) for row in rows]
        erased = self._erased_before(headers for _, headers in pairs)
        for row, headers in pairs:
            job = headers.get(names.JOB_ID) or headers.get(names.DLQ_JOB_ID)
            is_leftover = job in erased and row["consumer_group"] in own
            if job in self._erased_jobs or is_leftover:
                gone.append(row["pk"])
            elif job not in self._kept_jobs and self._is_message(row, headers):
                is_copy = names.DLQ_REASON in headers
                (gone if is_copy else waiting).append(row["pk"])
        return gone, waiting

    def _erased_before(self, messages: Iterable[dict[str, str]]) -> set[str]:
        """Return the jobs of this service that messages name, and that have no row any more, or an
        erased one: a run that was interrupted has erased them, and nobody knows whose they were.

        No worker of this service runs such a message.

        :param messages: their headers.
        """
        service = get_settings().service_name
        named = {
            key: headers[names.JOB_ID]
            for headers in messages
            if headers.get(names.SERVICE) == service and (key := key_of(headers.get(names.JOB_ID)))
        }
        rows = Job.objects.using(self._using).filter(pk__in=named).exclude(content_type=ERASED)
        for key in rows.values_list("pk", flat=True):
            del named[key]
        return set(named.values())

    def _is_message(self, row: dict[str, Any], headers: dict[str, str]) -> bool:
        person = self._person
        ids = [headers.get(name) for name in (names.ID, names.UNIQUE_ID, names.DLQ_MESSAGE_ID)]
        if person.has_key(bytes(row["key"] or b"")) or person.has_id(*ids):
            return True
        kind = headers.get(names.CONTENT_TYPE) or JSON.content_type
        return bool(person.fields and row["value"] is not None) and self._has_value(
            "messages", lambda: load_value(bytes(row["value"]), kind)
        )

    def find_events(self) -> None:
        """Empty the data of events; their ids stay, or the events would take effect again."""
        rows = ProcessedEvent.objects.filter(event_data__isnull=False)
        columns = ("event_id", "event_data")
        for chunk in self._read("processed_events", rows, columns, WITH_PAYLOADS):
            keys = [
                row["pk"]
                for row in chunk
                if self._person.has_id(row["event_id"]) or self._person.has_value(row["event_data"])
            ]
            if not self.report.is_dry_run and keys:
                events = ProcessedEvent.objects.using(self._using).filter(pk__in=keys)
                events.update(event_data=None, updated_at=CLOCK.now())
            self._add("processed_events", len(keys))

    def find_schedules(self) -> None:
        """Count schedules whose arguments are the person's; operators decide about them."""
        for chunk in self._read("schedules", Schedule.objects.all(), ("payload",), CHUNK):
            count = sum(self._person.has_value(row["payload"]) for row in chunk)
            self._keep(SCHEDULES, count)

    def _erase_log_entries(self, model: str, keys: Sequence[Any]) -> None:
        """Empty what the admin's log says about rows that are erased. Who changed them, and when,
        stays.

        That is done before the rows are erased: a run that was interrupted must find these again.
        """
        if not keys or not apps.is_installed("django.contrib.admin"):
            return
        from django.contrib.admin.models import LogEntry

        of_model = Q(content_type__app_label="kjo_django", content_type__model=model)
        entries = LogEntry.objects.using(router.db_for_write(LogEntry))  # a replica may lack some
        found = entries.filter(of_model, object_id__in=list(map(str, keys)))
        emptied = entries.filter(pk__in=list(found.values_list("pk", flat=True)))
        self._add("log_entries", emptied.update(object_repr="[erased]", change_message=""))


def _own_groups() -> set[str]:
    """Return the consumer groups of this service, and none: that of messages nobody has claimed."""
    conf = get_settings()
    return {"", *(conf.queue(name).consumer_group for name in registry.queue_names())}


def _headers(stored: Any) -> dict[str, str]:
    """Return headers of a message that are stored with their bytes in base64, as text."""
    try:
        return names.texts(names.from_json(stored or {}))
    except (AttributeError, TypeError, ValueError):
        return {}


# --- The internal job -----------------------------------------------------------------------------

ERASE = "kjo_django.erase_personal_data"
PERMISSION = "kjo_django.erase_personal_data"


def start_erasure(
    person: Person,
    *,
    actor: str,
    mode: Mode = Mode.DELETE,
    cancel: bool = False,
    dry_run: bool = False,
    reference: str = "",
) -> Job:
    """Enqueue an internal job that calls ``erase``, and return its row.

    Its payload holds digests only. Its result is the report.

    :param actor: who asked. The permission of a ``UserActor`` is checked again when the job runs.
    :raises ValueError: no worker would run it.
    """
    handler = registry.find(ERASE)
    assert handler is not None, "kjo_django is in INSTALLED_APPS"
    inputs = {
        "mode": str(Mode(mode)),
        "cancel": cancel,
        "dry_run": dry_run,
        "reference": reference[:MAX_REFERENCE],
        "found_by": str(person),
    }
    now = CLOCK.now().isoformat()
    request = Request(ERASE, person.dump(), now, inputs=inputs).asked_by(actor)
    definition: JobDefinition[..., Any] = JobDefinition(handler).using(queue=operations_queue())
    stored = definition.enqueue(**dataclasses.asdict(request))
    return Job.objects.using(jobs_database()).get(pk=stored.job_id)


def start_counted(row: Job, *, actor: str) -> Job:
    """Erase what a dry run has counted: enqueue the same request without ``dry_run``.

    :param row: the job of the dry run.
    :raises ValueError: the row is no such request, or no worker would run the job.
    :raises PermanentError: the request was made with another ``SECRET_KEY``.
    """
    request = request_of(row) if row.handler == ERASE else None
    if request is None:
        raise RefusedError(_("This job is not a request to erase"))
    inputs = {name: request.inputs[name] for name in ("mode", "cancel", "reference")}
    return start_erasure(Person.load(request.filter), actor=actor, **inputs)


# --- What is shown of requests --------------------------------------------------------------------


def newest(size: int) -> list[dict[str, Any]]:
    """Return what is shown of the newest requests, among the newest 100,000 jobs."""
    found = search.page(search.JobFilter(handler=ERASE), size=size).rows
    return described([row.pk for row in found])


def described(keys: Sequence[Any]) -> list[dict[str, Any]]:
    """Return what is shown of the requests with these keys, the newest first: no personal data."""
    rows = Job.objects.using(jobs_database()).filter(pk__in=keys, handler=ERASE).order_by("-pk")
    states = shown_states(list(rows))
    found = []
    for row in rows:
        request = request_of(row)
        report = None
        with suppress(MessageError, LookupError, TypeError):
            report = load_result(bytes(row.result)) if row.result is not None else None
        if request is not None:
            facts = {"id": row.pk, "state": states[row.pk], "asked_at": row.created_at}
            found.append({**facts, "actor": request.actor, **request.inputs, "report": report})
    return found


# --- The handler ----------------------------------------------------------------------------------


def carry_out(context: JobContext, **payload: Any) -> dict[str, Any]:
    """Carry out a request; the handler of the internal job."""
    request = Request(**payload)
    actor = actor_of(request, PERMISSION)
    person, inputs = Person.load(request.filter), request.inputs

    def on_read(kind: str, count: int) -> None:
        context.progress(text=f"{kind}: {count:,} read")
        context.raise_if_aborted()

    options = {"cancel": bool(inputs["cancel"]), "dry_run": bool(inputs["dry_run"])}
    reference = str(inputs["reference"])
    report = erase(
        person,
        mode=Mode(inputs["mode"]),
        actor=actor,
        reference=reference,
        on_read=on_read,
        **options,
    )
    if request.user and apps.is_installed("django.contrib.admin"):
        from django.contrib.admin.models import DELETION

        row = Job.objects.using(jobs_database()).get(pk=context.job_id)
        log_entries(request.user, [row], DELETION, summary(report, person, "", reference))
    return report.as_dict()


def permission_of(request: Request) -> str:
    """Return the permission that every request needs."""
    return PERMISSION
