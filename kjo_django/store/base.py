"""The store: the statements of the hot path, by way of the ORM."""

from __future__ import annotations

import functools
import itertools
import operator
import os
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.db import DatabaseError, connections, transaction
from django.db.models import (
    BooleanField,
    Case,
    Count,
    DateTimeField,
    F,
    Q,
    Sum,
    TextField,
    Value,
    When,
)
from django.db.models.constants import OnConflict
from django.db.models.expressions import RawSQL
from django.db.models.functions import Coalesce, Greatest, Length
from django.db.models.lookups import In
from django.utils import timezone

from kjo_django import states
from kjo_django.clock import CLOCK
from kjo_django.models import (
    EventKey,
    HeldJob,
    Job,
    Lease,
    ProcessedEvent,
    RateWindow,
    Workflow,
    WorkflowCount,
    WorkflowEdge,
    WorkflowStage,
    transition,
)
from kjo_django.states import JobState
from kjo_django.store.rows import (
    COLUMNS,
    NAMED_BY_OTHERS,
    Advance,
    Completing,
    Completion,
    DueJob,
    FollowerRow,
    JobRow,
    LineRow,
    Place,
    Publication,
    StageRow,
    StepCounts,
)
from kjo_django.values import ANY_SIZE, count_within

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.models import Model, QuerySet

WindowChange = tuple[str, str, str, datetime | None]
"""A change of the starts of a rate: its name, what was read, what is to be written, and until when
it is kept; None: as long as before."""


def _as_it_is(value: Any, connection: Any) -> Any:
    """Prepare nothing."""
    return value


class _ChangedError(Exception):
    """Somebody else has written the starts of a rate since they were read."""


class Store:
    """The reference implementation; subclasses do the same in fewer round trips.

    A store keeps the alias and the texts of its statements: any thread may use it, on its own
    connection.

    :param alias: of the database.
    """

    def __init__(self, alias: str) -> None:
        self.alias = alias
        operations: Any = connections[alias].ops
        quote = operations.quote_name
        # To quote the names of all columns takes longer than to store a job.
        columns = ", ".join(quote(field.column) for field in JOB_FIELDS)
        self._insert: dict[bool, tuple[str, str]] = {}
        for ignores, conflicts in ((False, None), (True, OnConflict.IGNORE)):
            begin = operations.insert_statement(on_conflict=conflicts)
            end = operations.on_conflict_suffix_sql(JOB_FIELDS, conflicts, [], [])
            self._insert[ignores] = f"{begin} kjo_job ({columns}) VALUES ", f" {end}"
        self._columns: list[tuple[str, Callable[..., Any] | None]] = [
            (field.attname, field.get_db_prep_save) for field in JOB_FIELDS
        ]
        """The columns of a job, each with the function that prepares its values for the driver."""
        place = [quote(column) for column in Place._fields]
        self._publish = _update_one(
            "publish",
            f"{' = %s, '.join(place)} = %s",
            "id = %s AND generation = %s AND attempts = %s "
            "AND available_at = COALESCE(%s, available_at)",
        )
        self._complete = _update_one(
            "complete",
            "finished_at = %s, error = '', lease_token = '', lease_expires_at = NULL, worker = %s, "
            "attempts = %s, started_at = %s, result = %s, result_ttl = %s, result_expires_at = %s, "
            + ", ".join(f"{column} = COALESCE(%s, {column})" for column in place),
            "id = %s AND generation = %s",
        )

    # --- Transactions -----------------------------------------------------------------------------

    def transaction(
        self,
        *,
        savepoint: bool = True,
        durable: bool = False,
        calls_handlers: bool = False,
        waits_for_disk: bool = True,
        defers: bool = False,
    ) -> AbstractContextManager[None]:
        """Return ``transaction.atomic()``.

        :param calls_handlers: whether code of the project runs in the transaction.
        :param defers: see ``Store.defers``.
        :param waits_for_disk: False lets the database commit before the data is on its disk: for
            data that is written again if a crash of the server loses it.
        """
        return transaction.atomic(using=self.alias, savepoint=savepoint, durable=durable)

    @contextmanager
    def writing(self, *, calls_handlers: bool = True) -> Iterator[None]:
        """Run the block in a transaction that will write, whatever it reads first.

        :param calls_handlers: see ``transaction``.
        """
        with self.transaction(calls_handlers=calls_handlers):
            self.take_write_lock()
            yield

    def take_write_lock(self, model: type[Model] = Job) -> None:
        """Wait until the current transaction may write, where a database has one writer at a time.

        :param model: any whose table this database has.
        """

    sends_several = False
    """Whether several statements can be sent as one."""

    def execute_with_next(self, sql: str, values: Sequence[Any]) -> None:
        """Execute a statement in the caller's transaction, by its end at the latest: in one round
        trip with another one where the database takes several. What it answers is not told.

        :raises DatabaseError: it failed, now or along with the next statement.
        """
        with connections[self.alias].cursor() as cursor:
            cursor.execute(sql, values)

    @property
    def defers(self) -> bool:
        """Whether new rows whose ids nobody needs may be sent at the end of the present block of
        ``transaction``: what the database refuses of them is raised there."""
        return False

    def execute_alone(self, sql: str, values: Sequence[Any]) -> int:
        """Execute a statement in a transaction of its own; return how many rows it has changed.
        What a crash of the server may lose is not waited for."""
        with connections[self.alias].cursor() as cursor:
            cursor.execute(sql, values)
            changed: int = cursor.rowcount
        return changed

    committing: tuple[str, ...] = ()
    """Regular expressions for the first words of statements that the server ends a transaction for,
    without being asked to."""
    changing: tuple[str, ...] = ()
    """What ordinary queries contain, in small letters, that may change something in the session."""

    def end_session(self, connection: BaseDatabaseWrapper, *, terminates: bool) -> None:
        """End the session of another thread's connection, which undoes its transaction.

        :param terminates: end a statement in progress, too, where this thread's session can.
        """
        raw: Any = connection.connection
        with socket.socket(fileno=os.dup(raw.fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)

    # --- Rows that may be there already -----------------------------------------------------------

    def insert_missing(self, rows: Sequence[Model]) -> None:
        """Insert rows of one model, but those whose key is taken."""
        every = type(rows[0])._default_manager.using(self.alias)
        every.bulk_create(rows, ignore_conflicts=True)

    def insert_or_update(
        self,
        rows: Sequence[Model],
        key: str,
        changed: Sequence[str],
        batch_size: int | None = None,
    ) -> None:
        """Insert rows of one model; of those whose key is taken, update some columns."""
        has_target = connections[self.alias].features.supports_update_conflicts_with_target
        type(rows[0])._default_manager.using(self.alias).bulk_create(
            rows,
            update_conflicts=True,
            unique_fields=[key] if has_target else None,
            update_fields=changed,
            batch_size=batch_size,
        )

    # --- Markers of effects -----------------------------------------------------------------------

    def insert_markers(
        self, keys: Collection[EventKey], now: datetime | None = None
    ) -> set[EventKey]:
        """Insert a marker for each key and return the keys that were new.

        To be called inside the transaction that carries the effects. A concurrent transaction that
        marks the same key blocks this one until it ends: if it commits, the key is a duplicate
        here; if it rolls back, the key is new here. All transactions insert keys in one order, so
        two groups never deadlock.

        :param now: when the effects took place; the present if not given.
        """
        if not keys:
            return set()
        now = now or CLOCK.now()
        times = {"processed_at": now, "created_at": now, "updated_at": now}
        rows = [ProcessedEvent(**key._asdict(), **times) for key in sorted(set(keys))]
        self.insert_missing(rows)
        markers = ProcessedEvent.objects.using(self.alias)
        # There is no ON CONFLICT … RETURNING: the new rows are those with the ids made above.
        ids = [row.pk for row in rows]
        ours = set(markers.filter(pk__in=ids).values_list("pk", flat=True))
        return {row.event_key for row in rows if row.pk in ours}

    def known_markers(
        self, keys: Collection[EventKey], at: datetime | None = None
    ) -> set[EventKey]:
        """Return those of the keys that are marked.

        :param at: only those that were inserted with this moment.
        """
        if not keys:
            return set()
        marked = ProcessedEvent.objects.using(self.alias).filter(
            service_name__in=sorted({key.service_name for key in keys}),
            event_id__in=sorted({key.event_id for key in keys}),
        )
        if at is not None:
            marked = marked.filter(processed_at=at)
        found = marked.order_by().values_list(*EventKey._fields)
        return {EventKey(*row) for row in found}.intersection(keys)

    def delete_markers(self, keys: Collection[EventKey]) -> None:
        """Delete markers of the current transaction: their handlers failed or must not run."""
        for service, event_type in {(key.service_name, key.event_type) for key in keys}:
            ids = [key.event_id for key in keys if key[1:] == (service, event_type)]
            ProcessedEvent.objects.using(self.alias).filter(
                service_name=service, event_type=event_type, event_id__in=ids
            ).delete()

    # --- Rows of a group --------------------------------------------------------------------------

    def job_rows(self, ids: Sequence[str], *, lock: bool) -> dict[str, JobRow]:
        """Return rows of jobs, keyed by the ids as given.

        :param ids: lower-case text with hyphens.
        :param lock: keep all others from changing the rows until the transaction ends.
        """
        rows = Job.objects.using(self.alias).filter(pk__in=ids).order_by("pk")
        features = connections[self.alias].features
        if lock and features.has_select_for_update:
            rows = rows.select_for_update(no_key=features.has_select_for_no_key_update)
        found = map(JobRow.read, rows.values_list(*COLUMNS))
        return {row.id_text: row for row in found}

    def job_rows_and_line(
        self, ids: Sequence[str], names: Sequence[str]
    ) -> tuple[dict[str, JobRow], Iterable[LineRow]]:
        """Return what ``job_rows`` does without a lock, and what ``read_line`` does."""
        return self.job_rows(ids, lock=False), self.read_line(ids, names)

    def read_line(self, ids: Sequence[UUID | str], names: Sequence[str]) -> Iterable[LineRow]:
        """Return the places of jobs in line, and those of the limits for which any job stands in
        line.

        :param ids: of jobs; no more than one statement binds, as of ``names``.
        :param names: of limits.
        """
        line = HeldJob.objects.using(self.alias).order_by()
        found: list[LineRow] = []
        if ids:
            found += line.filter(job_id__in=ids).values_list("job_id", "limit", "is_released")
        if names:
            crowded = line.filter(limit__in=names).values_list("limit", flat=True).distinct()
            found += [(None, name, False) for name in crowded]
        return found

    def insert_markers_and_lock(
        self, keys: Sequence[EventKey], ids: Sequence[str], now: datetime | None = None
    ) -> tuple[set[EventKey], dict[str, JobRow]]:
        """Insert a group's markers, then lock and return its rows; return which keys were new, too.

        The write comes first: a transaction on SQLite that reads first may be refused its write.

        :param now: as ``insert_markers`` takes it.
        """
        fresh = self.insert_markers(keys, now)
        return fresh, self.job_rows(ids, lock=True) if ids else {}

    def rows_of_foreign(
        self, queue: str, unique_ids: Collection[str], ids: Collection[str]
    ) -> tuple[dict[str, JobRow], dict[str, JobRow]]:
        """Return rows for messages that this service did not enqueue.

        A row with a destination is no open job but a record for others: its own message may be read
        before the relay has recorded that it was published.

        :param queue: the queue of the messages' retries.
        :param unique_ids: the unique ids their first failures gave their rows.
        :param ids: the jobs of this service whose ids the messages bear.
        :returns: by unique id, the rows of first failures; by id, the open jobs of this service
            with the generation ``NAMED_BY_OTHERS``.
        """
        wanted = Q(queue=queue, unique_id__in=list(unique_ids))
        if ids:
            wanted |= Q(pk__in=list(ids), state__in=states.OPEN, destination="")
        names, of_failures, named = set(unique_ids), {}, {}
        selected = Job.objects.using(self.alias).filter(wanted).values_list("queue", *COLUMNS)
        for its_queue, *values in selected:
            row = JobRow.read(values)
            if row.unique_id in names and its_queue == queue:
                of_failures[row.unique_id] = row
            if row.id_text in ids:
                named[row.id_text] = replace(row, generation=NAMED_BY_OTHERS)
        return of_failures, named

    # --- Leases in rows ---------------------------------------------------------------------------

    def take_row_leases(
        self, rows: Sequence[JobRow], token: str, now: datetime, expires_at: datetime
    ) -> set[UUID]:
        """Write a worker's lease into rows, except into those that changed after they were read.

        No row is locked between the read and this write. A transaction over both would hold its
        rows while its worker asks coordination about their holders.

        :returns: the ids of the jobs that are leased.
        """
        alike: dict[tuple[Any, ...], list[UUID]] = {}
        for row in rows:
            judged = (row.generation, row.attempts, row.lease_token, row.lease_expires_at)
            alike.setdefault(judged, []).append(row.id)
        won: set[UUID] = set()
        with self.transaction() if alike else nullcontext():
            for (generation, attempts, holder, until), ids in alike.items():
                lease = {"lease_expires_at": until} if until else {"lease_expires_at__isnull": True}
                jobs = Job.objects.using(self.alias).filter(pk__in=ids)
                changed = jobs.filter(
                    generation=generation,
                    attempts=attempts,
                    lease_token=holder,
                    state__in=states.OPEN,
                    **lease,
                ).update(lease_token=token, lease_expires_at=expires_at, started_at=now)
                if changed < len(ids):
                    ours = jobs.filter(lease_token=token, lease_expires_at=expires_at)
                    won.update(ours.values_list("pk", flat=True))
                else:
                    won.update(ids)
        return won

    def renew_row_leases(self, ids: Collection[UUID], token: str, expires_at: datetime) -> None:
        """Extend a worker's leases in rows that nobody else holds locked.

        A job that is being recorded needs no longer lease, and two statements that wait for each
        other's rows would deadlock.
        """
        if not ids:
            return
        features = connections[self.alias].features
        with transaction.atomic(using=self.alias):
            jobs = Job.objects.using(self.alias).filter(pk__in=ids, lease_token=token)
            if features.has_select_for_update_skip_locked:
                free = jobs.select_for_update(
                    skip_locked=True, no_key=features.has_select_for_no_key_update
                )
                jobs = jobs.filter(pk__in=list(free.values_list("pk", flat=True)))
            jobs.update(lease_expires_at=expires_at)

    def release_row_leases(self, ids: Collection[UUID], token: str) -> None:
        """Take a worker's lease out of the rows of jobs that it has not begun."""
        if ids:
            Job.objects.using(self.alias).filter(pk__in=ids, lease_token=token).update(
                lease_token="", lease_expires_at=None, started_at=None
            )

    # --- Completions ------------------------------------------------------------------------------

    def complete(
        self,
        completions: Sequence[Completion],
        now: datetime,
        *,
        token: str | None = None,
        is_last: bool = False,
    ) -> set[UUID]:
        """Write completions into the jobs' rows, inside the caller's transaction.

        :param now: when they ended.
        :param token: of a row lease that jobs must still have; those without it stay as they are.
        :param is_last: the caller does nothing more but commit, whatever is returned: the commit
            may go along with the statement.
        :returns: the ids of the jobs recorded.
        """
        if not completions:
            return set()
        connection: Any = connections[self.alias]
        # Past Django's fields: they take as long for a job as SQLite does to write it.
        adapt = connection.ops.adapt_datetimefield_value
        has_uuids = connection.features.has_native_uuid_field
        binary = _FIELDS["result"].get_db_prep_save
        rows, moment = [], adapt(now)
        # The expiry is common to nearly all: to prepare it takes longer than to write it.
        expiry: dict[int, Any] = {}
        for one in completions:
            ttl = one.row.result_ttl if one.result_ttl is None else one.result_ttl
            if ttl not in expiry:
                expiry[ttl] = adapt(now + timedelta(milliseconds=ttl))
            *place, since = one.place or NOWHERE
            rows.append(
                (
                    *(moment, one.worker, one.attempt, adapt(one.started_at)),
                    None if one.result is None else binary(one.result, connection),
                    *(ttl, expiry[ttl], *place, since and adapt(since)),
                    *(one.row.id if has_uuids else one.row.id.hex, one.row.generation),
                    *(() if token is None else (token,)),
                )
            )
        statement = self._complete + ("" if token is None else " AND lease_token = %s")
        with connection.cursor() as cursor:
            if len(rows) == 1:
                cursor.execute(statement, rows[0])
                return {completions[0].row.id} if cursor.rowcount else set()
            has_written = self._execute_each(cursor, statement, rows)
            return {one.row.id for one, has in zip(completions, has_written, strict=True) if has}

    def _execute_each(self, cursor: Any, sql: str, rows: Sequence[Sequence[Any]]) -> Iterator[bool]:
        """Execute a statement once for each of several rows of values, and yield for each whether
        it has changed anything: of an ``executemany`` only the number of all is known."""
        for values in rows:
            cursor.execute(sql, values)
            yield cursor.rowcount > 0

    # --- Steps of workflows -----------------------------------------------------------------------

    def count_steps(
        self, changes: Mapping[int, StepCounts], completing: Completing = None
    ) -> list[tuple[UUID, StepCounts]]:
        """Add changes to rows of counts, inside the caller's transaction. All transactions lock the
        rows in one order.

        :param changes: by the key of the row.
        :param completing: are completed first, as by ``complete``; the caller has their rows
            locked.
        :returns: the stage of each row, and its numbers as they are now.
        :raises DatabaseError: a row of ``completing`` could not be completed.
        """
        if completing is not None:
            refuse_uncompleted(len(self.complete(*completing)), completing)
        counts = WorkflowCount.objects.using(self.alias)
        rows = counts.filter(pk__in=changes).order_by("pk")
        features = connections[self.alias].features
        if features.has_select_for_update:
            rows = rows.select_for_update(no_key=features.has_select_for_no_key_update)
        found = []
        for row in rows:
            old = row.open_count, row.failed_count, row.cancelled_count
            new = StepCounts(*map(operator.add, old, changes[row.pk]))
            counts.filter(pk=row.pk).update(
                open_count=new.open, failed_count=new.failed, cancelled_count=new.cancelled
            )
            found.append((row.stage_id, new))
        return found

    def lock_workflows(
        self,
        ids: Collection[UUID],
        changes: Mapping[int, StepCounts] | None = None,
        stages: Collection[UUID] = (),
        completing: Completing = None,
    ) -> tuple[list[Workflow], list[StageRow]]:
        """Lock workflows in the order of their keys, inside the caller's transaction, and return
        them; return what ``read_stages`` finds under these locks, too.

        :param changes: are added to rows of counts first, as by ``count_steps``, and so is
            ``completing``.
        :param stages: the keys of the stages that are read.
        """
        if changes or completing is not None:
            self.count_steps(changes or {}, completing)
        rows = Workflow.objects.using(self.alias).filter(pk__in=ids).order_by("pk")
        features = connections[self.alias].features
        if features.has_select_for_update:
            rows = rows.select_for_update(no_key=features.has_select_for_no_key_update)
        return list(rows), self.read_stages(stages) if stages else []

    def read_stages(self, ids: Collection[UUID]) -> list[StageRow]:
        """Return stages with the sums of their counts and with the stages that wait for them."""
        stages = WorkflowStage.objects.using(self.alias).filter(pk__in=ids)
        bad = Sum(F("counts__failed_count") + F("counts__cancelled_count"))
        sums = stages.annotate(open=Sum("counts__open_count"), bad=bad)
        columns = ("id", "workflow_id", "handler", "finished_at", "open", "bad")
        rows = {row[0]: StageRow(*row) for row in sums.values_list(*columns)}
        ended = [row.id for row in rows.values() if row.bad or not row.open]
        if ended:
            edges = WorkflowEdge.objects.using(self.alias).filter(required__in=ended, is_met=False)
            unmet = Count("stage__requirements", filter=Q(stage__requirements__is_met=False))
            names = [f"stage__{name}" for name in FollowerRow._fields[2:-2]]
            found = edges.annotate(unmet=unmet).order_by("pk")
            for required, *follower in found.values_list(
                "required_id", "pk", "stage_id", *names, "unmet"
            ):
                rows[required].followers.append(FollowerRow(*follower))
        return list(rows.values())

    def write_advance(self, advance: Advance, *, is_last: bool = False) -> list[DueJob]:
        """Write what follows from steps that have ended, under the locks of their workflows.

        :param is_last: the caller does nothing more but commit: the commit may go along.
        :returns: the steps that were leased.
        """
        if advance.ended:
            stages = WorkflowStage.objects.using(self.alias).filter(pk__in=advance.ended)
            stages.update(finished_at=advance.now)
        if advance.met:
            edges = WorkflowEdge.objects.using(self.alias).filter(pk__in=advance.met)
            edges.update(is_met=True)
        leased = self._release_leased(advance) if advance.lease is not None else []
        if advance.released:
            jobs = Job.objects.using(self.alias).filter(stage__in=advance.released)
            transition("release", jobs, available_at=Greatest("available_at", advance.now))
        for workflow in advance.workflows:
            workflow.save(using=self.alias, update_fields=WORKFLOW_COLUMNS)
        return leased

    def _release_leased(self, advance: Advance) -> list[DueJob]:
        assert advance.lease is not None
        token, until = advance.lease
        jobs = Job.objects.using(self.alias)
        steps = jobs.filter(stage__in=advance.reserved, state=JobState.WAITING, key="")
        due = steps.filter(priority=None, available_at__lte=advance.now)
        leased = [DueJob._make(row) for row in due.values_list(*DueJob._fields)]
        rows = jobs.filter(pk__in=[job.id for job in leased])
        changes = {"lease_token": token, "lease_expires_at": until}
        transition("release", rows, available_at=advance.now, **changes)
        return leased

    # --- New jobs ---------------------------------------------------------------------------------

    def insert_jobs(self, jobs: Sequence[Job], *, ignore_conflicts: bool = False) -> int:
        """Insert rows and return how many.

        ``bulk_create`` would open a transaction for one, and look at each column of each row for
        many.

        :param ignore_conflicts: leave out rows whose unique id is taken.
        """
        rows = map(self._values_of, jobs)
        return self._insert_rows(rows, len(jobs), ignore_conflicts=ignore_conflicts)

    def insert_alike(self, job: Job, contents: Sequence[tuple[UUID, str, bytes]]) -> None:
        """Insert jobs without an instance of each.

        :param job: all other columns are as of this one, which is not stored itself.
        :param contents: id, key and payload of each.
        """
        self._insert_rows(self._alike(job, contents), len(contents))

    def _alike(
        self, job: Job, contents: Iterable[tuple[UUID, str, bytes]]
    ) -> Iterator[Sequence[Any]]:
        """Yield the values of each row: one list, over and over."""
        connection, row = connections[self.alias], self._values_of(job)
        (id, prepare_id), (key, prepare_key), (payload, prepare_payload) = (
            (at, self._columns[at][1] or _as_it_is) for at in _OWN
        )
        for content in contents:
            row[id] = prepare_id(content[0], connection)
            row[key] = prepare_key(content[1], connection)
            row[payload] = prepare_payload(content[2], connection)
            yield row

    def _values_of(self, job: Job) -> list[Any]:
        connection = connections[self.alias]
        return [
            prepare(getattr(job, name), connection) if prepare else getattr(job, name)
            for name, prepare in self._columns
        ]

    def _insert_rows(
        self, rows: Iterable[Sequence[Any]], count: int, *, ignore_conflicts: bool = False
    ) -> int:
        connection = connections[self.alias]
        begin, end = self._insert[ignore_conflicts]
        size = min(1000, (connection.features.max_query_params or 30_000) // len(JOB_FIELDS))
        stored = 0
        several = transaction.atomic(using=self.alias, savepoint=False)
        with several if count > size else nullcontext(), connection.cursor() as cursor:
            values = itertools.chain.from_iterable(rows)
            for start in range(0, count, size):
                length = min(size, count - start)
                places = ", ".join([JOB_PLACES] * length)
                chunk = list(itertools.islice(values, length * len(JOB_FIELDS)))
                cursor.execute(begin + places + end, chunk)
                stored += cursor.rowcount
        return stored

    def insert_steps(
        self, rows: Sequence[Sequence[Model]], jobs: Sequence[Job], *, is_last: bool = False
    ) -> None:
        """Insert jobs that are steps, and the rows that their workflow needs for them, inside the
        caller's transaction.

        :param rows: of one model each; none of them refers to one behind it.
        :param is_last: the caller does nothing more but commit: the commit may go along.
        """
        for each in rows:
            if each:
                type(each[0])._default_manager.using(self.alias).bulk_create(each)
        if jobs:
            self.insert_jobs(jobs)

    def may_copy(self, count: int) -> bool:
        """Return whether ``copy_rows`` can store so many rows, and pays."""
        return False

    def copy_rows(
        self, table: str, types: Mapping[str, str], rows: Iterable[Sequence[Any]]
    ) -> None:
        """Write rows by COPY, in a transaction of their own if none is open.

        :param types: the columns, each with the type whose format its values are written in.
        """
        raise NotImplementedError

    # --- The relay --------------------------------------------------------------------------------

    has_independent_writers = False
    """Whether two connections can write different rows without waiting for each other."""

    def due_jobs(
        self,
        queues: Collection[str],
        limit: int,
        without: Collection[UUID] = (),
        without_topics: Collection[str] = (),
        max_bytes: int = ANY_SIZE,
    ) -> list[DueJob]:
        """Return rows that are due, in order, with what their messages are made of.

        :param queues: only those of these.
        :param limit: at most so many.
        :param without: ids of rows to leave out.
        :param without_topics: destinations whose rows to leave out.
        :param max_bytes: of payloads: no row follows the one with which they reach it.
        """
        rows = Job.objects.using(self.alias).filter(In(_QUEUE, list(queues)))
        rows = rows.exclude(pk__in=list(without)).exclude(destination__in=list(without_topics))
        rows = rows.filter(available_at__lte=CLOCK.now())
        due = self._first_due(rows, ("available_at", "id"), limit, max_bytes // limit)
        return self._loaded(due, max_bytes)

    def _first_due(
        self, rows: QuerySet[Job, Any], order: Sequence[str], limit: int, small: int | None = None
    ) -> QuerySet[Job, Any]:
        """Return the first of these rows that await publishing: no worker has a lease in them.

        :param small: the columns of due jobs and the length of each payload are returned, but no
            payload that is longer than this; None for the columns of ``rows``.
        """
        if small is not None:
            names = ["small_payload" if name == "payload" else name for name in DueJob._fields]
            sized = rows.annotate(size=Length("payload"))
            small_payload = Case(When(size__lte=small, then="payload"))
            rows = sized.annotate(small_payload=small_payload).values_list(*names, "size")
        free = rows.exclude(lease_expires_at__gt=CLOCK.now())
        return free.filter(_AWAITING_PUBLISH).order_by(*order)[:limit]

    def _loaded(self, rows: Iterable[Sequence[Any]], max_bytes: int) -> list[DueJob]:
        """Return due jobs of rows that end with the length of their payload, and have none where it
        is large. Those that the limit allows are given theirs; what changes meanwhile is left out,
        and is due again."""
        found = list(rows)
        found = found[: count_within((row[-1] for row in found), max_bytes)]
        jobs = [DueJob._make(row[:-1]) for row in found]
        large = {row[0] for row in found if row[_PAYLOAD] is None}
        if not large:
            return jobs
        stored = Job.objects.using(self.alias).filter(pk__in=large)
        payloads = {row[:2]: bytes(row[2]) for row in stored.values_list(*_CONTENT)}
        return [
            job._replace(payload=payloads[job.id, job.generation]) if job.id in large else job
            for job in jobs
            if job.id not in large or (job.id, job.generation) in payloads
        ]

    def due_jobs_of(
        self,
        queue: str,
        limit: int,
        without: Collection[UUID] = (),
        without_topics: Collection[str] = (),
        max_bytes: int = ANY_SIZE,
        priorities: tuple[int, int] | None = None,
    ) -> list[DueJob]:
        """Return the due rows of one queue, in order, however many rows of others are due before.

        :param priorities: only rows between this least and this highest priority, the highest
            first; rows without any are left out.

        For a cursor PostgreSQL prefers a plan that begins at once; otherwise it may sort a backlog
        that its statistics do not show yet. The queue stands in the order and in a range, so only
        the index by queue has this order: PostgreSQL does not read another queue's backlog.
        """
        rows = Job.objects.using(self.alias).exclude(pk__in=list(without))
        rows = rows.exclude(destination__in=list(without_topics))
        rows = rows.filter(available_at__lte=CLOCK.now())
        if priorities is None:
            due = rows.filter(queue__gte=queue, queue__lte=queue)
            order = "queue", "available_at", "id"
        else:
            # Spelled like the condition of the partial index, or it is not used.
            due = rows.filter(queue=queue, priority__isnull=False, priority__range=priorities)
            order = "-priority", "available_at", "id"
        columns = self._first_due(due, order, limit, max_bytes // limit)
        return self._loaded(columns.iterator(chunk_size=limit), max_bytes)

    def next_due(
        self,
        queues: Collection[str],
        without: Collection[UUID] = (),
        without_topics: Collection[str] = (),
    ) -> datetime | None:
        """Return when the first of these rows is due, or was; None when none waits."""
        rows = Job.objects.using(self.alias).filter(In(_QUEUE, list(queues)))
        rows = rows.exclude(pk__in=list(without)).exclude(destination__in=list(without_topics))
        moments = rows.values_list("available_at", flat=True)
        return next(iter(self._first_due(moments, ("available_at",), 1)), None)

    def awaiting_publish(self, ids: Iterable[UUID]) -> set[tuple[UUID, int, int, datetime]]:
        """Return those of the jobs whose rows do not say that they were published: the id, the
        generation, the attempts, and since when each is due."""
        rows = Job.objects.using(self.alias).filter(_AWAITING_PUBLISH, pk__in=list(ids))
        return set(rows.values_list("pk", "generation", "attempts", "available_at"))

    def record_published(self, published: Sequence[Publication], now: datetime) -> set[UUID]:
        """Write where messages went into the rows of their jobs, unless a job has moved on: also to
        another moment, for which it will have another message.

        :returns: the ids of the jobs whose rows others had locked, or which are gone; a lock is not
            waited for.
        """
        connection = connections[self.alias]
        free = every = {one.job.id for one in published}
        with transaction.atomic(using=self.alias):
            if connection.features.has_select_for_update_skip_locked:
                rows = Job.objects.using(self.alias).filter(pk__in=list(free))
                free = set(rows.select_for_update(skip_locked=True).values_list("pk", flat=True))
            since = _FIELDS["queued_at"].get_db_prep_save(now, connection)
            prepare_id = _FIELDS["id"].get_db_prep_save
            prepare = _FIELDS["available_at"].get_db_prep_save
            sent = [
                (
                    *(topic, partition, offset, since),
                    *(prepare_id(job.id, connection), job.generation, job.attempts),
                    prepare(job.available_at, connection),
                )
                for job, topic, partition, offset in published
                if job.id in free
            ]
            with connection.cursor() as cursor:
                cursor.executemany(self._publish, sent)
        return every - free

    def complete_forwarded(self, published: Sequence[Publication], now: datetime) -> None:
        """Complete the rows of records for others: publishing is all that such a row asks for.

        A row whose destination is gone is left alone: a consumer of this service has read the
        record before, has failed, and the row now holds the retries.
        """
        if not published:
            return
        with transaction.atomic(using=self.alias, savepoint=False):
            for job, _, partition, offset in published:
                rows = Job.objects.using(self.alias).at(job.id, job.generation)
                transition(
                    "complete",
                    rows.exclude(destination=""),
                    topic=job.destination,
                    partition=partition,
                    offset=offset,
                    queued_at=now,
                    finished_at=now,
                    attempts=job.attempts + 1,
                    error="",
                )

    # --- Leases of coordination -------------------------------------------------------------------

    has_one_writer = False
    """Whether a transaction that writes waits until no other one does."""

    def claim_leases(
        self, names: Sequence[str], token: str, ttl: timedelta
    ) -> dict[str, tuple[bool, int]]:
        """Take the leases that are free or ``token``'s own, in a transaction of their own.

        :param names: without repeats, in one order; no more than one statement binds.
        :returns: for each name whether it is ``token``'s now, and how often it was claimed.
        :raises RuntimeError: in a transaction: nobody else would see the leases before its commit.
        """
        # A lease lost in a crash of the server harms nobody.
        with self.transaction(durable=True, waits_for_disk=False):
            leases = Lease.objects.using(self.alias)
            found: dict[str, Lease] = {}
            # A row that is released (deleted) between the two statements is inserted again.
            for _ in range(3):
                if missing := [name for name in names if name not in found]:
                    found |= self.lock_leases(missing)
            now = CLOCK.now()
            ours = {n for n, row in found.items() if row.token == token and row.expires_at > now}
            free = {n for n, row in found.items() if row.expires_at <= now}
            if ours:
                leases.filter(name__in=ours).update(expires_at=now + ttl)
            if free:
                leases.filter(name__in=free).update(
                    token=token, expires_at=now + ttl, deliveries=F("deliveries") + 1
                )
        return {
            name: (
                name in ours or name in free,
                found[name].deliveries + (name in free) if name in found else 0,
            )
            for name in names
        }

    def lock_leases(self, names: Sequence[str]) -> dict[str, Lease]:
        """Return the leases of these names, locked in one order until the transaction ends, so that
        claimers cannot deadlock. A name without one is given one that has expired. The INSERT comes
        first: with it an old SQLite's transaction waits for the write lock instead of failing on a
        stale snapshot.

        :param names: in order.
        """
        self.insert_missing([Lease(name=name, expires_at=_LONG_AGO) for name in names])
        rows = Lease.objects.using(self.alias).filter(name__in=names).order_by("name")
        return {row.name: row for row in rows.select_for_update()}

    def delete_leases(self, names: Sequence[str], token: str) -> None:
        """Delete the leases that ``token`` still holds, prepared without Django, which is slow; in
        a transaction of the caller's with its commit.

        :param names: no more than one statement binds.
        """
        places = ", ".join(["%s"] * len(names))
        statement = f"DELETE FROM kjo_lease WHERE name IN ({places}) AND token = %s"  # noqa: S608 - places
        with connections[self.alias].cursor() as cursor:
            cursor.execute(statement, [*names, token])

    def read_windows(self, names: Sequence[str]) -> tuple[datetime, dict[str, str]]:
        """Return what time it is, as ``server_time`` does, and the starts of those of the rates
        that have any.

        :param names: no more than one statement binds.
        """
        rows = RateWindow.objects.using(self.alias).filter(name__in=names)
        found = dict(rows.values_list("name", "starts"))
        return self.server_time(), found

    def write_windows(
        self, changes: Sequence[WindowChange]
    ) -> tuple[datetime, dict[str, str]] | None:
        """Write the starts of rates if all are what they were read as; return None then, else what
        ``read_windows`` returns of them: nothing is written.

        :param changes: at least one.
        """
        rows = RateWindow.objects.using(self.alias)
        try:
            with nullcontext() if len(changes) <= 1 else self.transaction(durable=True):
                if self._write_unchanged(rows, changes) < len(changes):
                    raise _ChangedError
        except _ChangedError:
            return self.read_windows([name for name, _, _, _ in changes])
        return None

    @staticmethod
    def _write_unchanged(rows: QuerySet[RateWindow], changes: Sequence[WindowChange]) -> int:
        """Write those that are what they were read as; return how many."""
        written = 0
        for start in range(0, len(changes), _WINDOWS):
            some = changes[start : start + _WINDOWS]
            known = [Q(name=name, starts=before) for name, before, _, _ in some]
            starts = [When(name=name, then=Value(after)) for name, _, after, _ in some]
            kept = [When(name=name, then=Value(until)) for name, _, _, until in some if until]
            written += rows.filter(functools.reduce(operator.or_, known)).update(
                starts=Case(*starts, output_field=TextField()),
                expires_at=Case(*kept, default=F("expires_at"), output_field=DateTimeField()),
            )
        return written

    has_clock = False
    """Whether the database tells the time by a clock of its own."""

    def server_time(self) -> datetime:
        """Return what time it is for everybody who uses the database: its own, where it has one."""
        return CLOCK.now()

    # --- Sessions and wake-up calls ---------------------------------------------------------------

    has_notify = False
    """Whether sessions can notify one another, have names, and can be ended by them."""

    def notify(self, payloads: Collection[str]) -> None:
        """Send notifications when the current transaction commits.

        :raises NotImplementedError: the database has no notifications.
        """
        raise NotImplementedError

    def name_session(self, connection: BaseDatabaseWrapper, name: str) -> bool:
        """Name a connection's session, where sessions have names.

        :param connection: newly made; not always the thread's own, to this database.
        :returns: whether the session may be ended by its name: False behind a pooler that would
            hand it on, with its name, to clients without one.
        """
        return True

    def idle_transactions(self, prefix: str, width: int, since: timedelta) -> dict[int, str]:
        """Return the sessions whose open transaction has done nothing for so long, by process id.

        :param prefix: what their names begin with.
        :param width: how much of a name is returned.
        """
        return {}

    def end_sessions(self, pids: Sequence[int]) -> None:
        """End sessions of the server."""

    def session_counts(self, prefix: str) -> tuple[int, int] | None:
        """Return how many sessions have a name with this beginning, and how many have not; None
        where sessions have no names."""
        return None

    def streaming(self) -> AbstractContextManager[None]:
        """Return a context in which to read a result in chunks."""
        return nullcontext()


def refuse_uncompleted(count: int, completing: Completing) -> None:
    """Raise an error unless so many are all of those that were to be completed. Their steps are
    counted, and what has waited for them would run."""
    if completing is not None and count != len(completing[0]):
        why = "Rows of running steps were changed by something else in their own transaction"
        raise DatabaseError(why)


def _update_one(action: str, assignments: str, condition: str) -> str:
    """Return the statement that carries out an action on a job whose state allows it."""
    expected = "', '".join(states.TRANSITIONS[action])
    return (
        f"UPDATE kjo_job SET state = '{states.RESULT_OF[action]}', {assignments} "  # noqa: S608 - names of columns and states
        f"WHERE {condition} AND state IN ('{expected}')"
    )


_QUEUE: Any = Coalesce("queue", Value(""))
"""The column, hidden in an expression: by its index on the queue SQLite would sort a whole backlog
for every batch."""
# Spelled out as in the partial indexes: SQLite uses none of them for states that are parameters.
_AWAITING_PUBLISH = RawSQL(  # noqa: S611 - names of states
    f"state IN ({', '.join(repr(state.value) for state in states.AWAITING_PUBLISH)})",
    (),
    BooleanField(),
)
_LONG_AGO = datetime(1970, 1, 1, tzinfo=timezone.get_fixed_timezone(0))
_WINDOWS = 100
"""Rates in one statement."""
_PAYLOAD = DueJob._fields.index("payload")
_CONTENT = ("id", "generation", "payload")
_FIELDS = {field.attname: field for field in Job._meta.concrete_fields}
JOB_FIELDS = [field for field in Job._meta.local_concrete_fields if field.name != "worker"]
"""The columns of a job's row, in the order of ``INSERT`` and ``COPY``; of a new job none worked."""
_OWN = [[field.attname for field in JOB_FIELDS].index(name) for name in ("id", "key", "payload")]
"""The places of what tells jobs from one another that are otherwise alike."""
JOB_PLACES = f"({', '.join(['%s'] * len(JOB_FIELDS))})"
WORKFLOW_COLUMNS = ["state", "reason", "finished_at", "open_stage_count", "step_count", "deadline"]
"""The columns of a workflow that change."""
NOWHERE = (None,) * len(Place._fields)
"""The columns of a place that a completion leaves as they are."""
