"""The store on PostgreSQL: arrays as parameters, and several statements in one round trip."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import datetime, timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

from django.db import connections, transaction
from django.db.models import AutoField, Model

from kjo_django import states
from kjo_django.clock import CLOCK
from kjo_django.ids import uuid7_values
from kjo_django.models import EventKey, Job, Lease, Workflow
from kjo_django.store.base import (
    JOB_FIELDS,
    JOB_PLACES,
    NOWHERE,
    WORKFLOW_COLUMNS,
    Store,
    WindowChange,
    refuse_uncompleted,
)
from kjo_django.store.cursors import (
    array_text,
    psycopg_module,
    takes_several,
    text_array,
)
from kjo_django.store.rows import (
    COLUMNS,
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
from kjo_django.store.servers import leave_retired
from kjo_django.values import ANY_SIZE

if TYPE_CHECKING:
    import psycopg
    from django.db.backends.base.base import BaseDatabaseWrapper

NOTIFY_CHANNEL = "kjo"
"""The one channel of the server; what is notified is the payload, so it needs no quoting."""
_TIMESTAMPTZ = 1184
_IDLE = 0
"""State of libpq's: no transaction."""
MOST_TOGETHER = 500
"""Rows of a workflow that are stored by one text; more by a statement for each table."""
COPY_FROM = 20
"""Fewer rows are stored sooner by an INSERT, which needs no transaction of its own."""


def _places(columns: int, rows: int) -> str:
    """Return the places of values in an INSERT."""
    return ", ".join([f"({', '.join(['%s'] * columns)})"] * rows)


@cache
def _insert_of(model: type[Model]) -> tuple[str, list[str]]:
    """Return the beginning of an INSERT of rows of a model, and the columns that it gives."""
    fields = [each for each in model._meta.concrete_fields if not isinstance(each, AutoField)]
    columns = [each.attname for each in fields]
    return f"INSERT INTO {model._meta.db_table} ({', '.join(columns)}) VALUES ", columns  # noqa: S608 - names of columns


def _insertion(rows: Sequence[Model]) -> _Statement:
    """Return the statement that inserts rows of one model."""
    table, columns = _insert_of(type(rows[0]))
    values = [getattr(row, column) for row in rows for column in columns]
    return table + _places(len(columns), len(rows)), values


def read_times_natively(cursor: Any) -> None:
    """Let this cursor read instants by psycopg's own loader, in C. Django's loader, in Python, only
    gives another class of time zone."""
    psycopg = psycopg_module()
    loader = psycopg.adapters.get_loader(_TIMESTAMPTZ, psycopg.pq.Format.TEXT)
    cursor.cursor.adapters.register_loader(_TIMESTAMPTZ, loader)


@contextmanager
def begin_with_first_query(connection: Any, opening: Sequence[str] = ()) -> Iterator[None]:
    """Send the ``BEGIN`` of a transaction in one round trip with its first query.

    To be entered within the outermost ``atomic()``, before any query. psycopg, out of autocommit,
    would send a ``BEGIN`` of its own before that query, and wait for it. So the connection is put
    into autocommit until Django ends the transaction. Code of projects must not run in it: in
    autocommit Django opens the cursors of ``iterator()`` "with hold", which cannot lock rows. In
    front of a query that must be sent alone, psycopg sends its ``BEGIN`` after all.

    :param opening: statements that come before that query, too.
    """
    wrappers = connection.execute_wrappers

    def send(execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: Any) -> Any:
        if send not in wrappers:  # what is sent before this query has begun it
            return execute(sql, params, many, context)
        wrappers.remove(send)
        cursor = context["cursor"].cursor
        driver = cursor.connection
        if (
            _goes_along(cursor, sql, params, many)
            and driver.pgconn.transaction_status == _IDLE
            and not driver.autocommit
        ):
            driver.autocommit = True
            front = [(text, ()) for text in (_begin(driver), *opening)]
            try:
                return _execute_behind(front, execute, sql, params, context)
            finally:
                if driver.pgconn.transaction_status == _IDLE:
                    # Refused before it began: what comes next must begin a transaction still.
                    driver.autocommit = False
        with connection.cursor() as own:
            for text in opening:
                own.execute(text)
        return execute(sql, params, many, context)

    wrappers.append(send)
    try:
        yield
    finally:
        if send in wrappers:  # no query was executed
            wrappers.remove(send)


def _goes_along(cursor: Any, sql: Any, params: Any, many: bool) -> bool:
    """Return whether a query may be sent as one text with statements in front of it.

    :param cursor: the database's own, inside Django's wrapper.
    """
    is_plain = isinstance(sql, str) and not many and not isinstance(params, Mapping)
    return is_plain and takes_several(cursor)


def _execute_behind(
    front: Sequence[_Statement], execute: Callable[..., Any], sql: str, params: Any, context: Any
) -> Any:
    """Execute a query in one round trip with statements in front of it, which answer nothing."""
    if not params:
        if params is None:  # no parameter is looked for in it
            sql = sql.replace("%", "%%")
        params = ()
    text = "; ".join([*(statement for statement, _ in front), sql])
    values = [*(value for _, some in front for value in some), *params]
    answer = execute(text, values, False, context)
    for _ in front:  # another wrapper may have passed over results of its own before
        context["cursor"].cursor.nextset()
    return answer


class _Along:
    """What takes no round trip of its own in one block of ``transaction``: it goes along with the
    next query, with the commit, or with the end of a block within a transaction of the caller's.

    :param block: the block of ``atomic()``, if it stays for another statement.
    """

    def __init__(
        self,
        execute: Callable[[str, Sequence[Any]], Any],
        block: transaction.Atomic | None = None,
        *,
        defers: bool = False,
    ) -> None:
        self._execute = execute
        self.block = block
        self.defers = defers
        """Whether the first statement of the block may be among them."""
        self.before: list[_Statement] = []
        """Statements that are sent in front of the next query."""
        self.leases: list[tuple[list[str], str]] = []
        """Leases to be deleted when it is committed: their names, and the token that has them."""

    def __call__(
        self, execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: Any
    ) -> Any:
        """Execute a query; see ``connection.execute_wrapper``."""
        if not self.before or self.block not in context["connection"].atomic_blocks:
            return execute(sql, params, many, context)
        before, self.before = self.before, []
        if _goes_along(context["cursor"].cursor, sql, params, many):
            return _execute_behind(before, execute, sql, params, context)
        for statement in before:
            self._execute(*statement)
        return execute(sql, params, many, context)


def _is_ours(wrapper: Callable[..., Any]) -> bool:
    """Return whether a query wrapper is of this package: an object, a function or a method."""
    return str(getattr(wrapper, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]


def _begin(driver: Any) -> str:
    """Return the statement a connection of psycopg 3 begins its transactions with."""
    words = ["BEGIN"]
    if driver.isolation_level is not None:
        level = psycopg_module().IsolationLevel(driver.isolation_level)
        words.append(f"ISOLATION LEVEL {level.name.replace('_', ' ')}")
    if driver.read_only is not None:
        words.append("READ ONLY" if driver.read_only else "READ WRITE")
    if driver.deferrable is not None:
        words.append("DEFERRABLE" if driver.deferrable else "NOT DEFERRABLE")
    return " ".join(words)


class PostgresStore(Store):
    """Each statement's text stays the same however many rows it is for."""

    def __init__(self, alias: str) -> None:
        super().__init__(alias)
        psycopg_module()  # Django alone would go on with psycopg2
        # psycopg writes all values but JSON as the fields have them.
        self._columns = [(name, how if name == "headers" else None) for name, how in self._columns]
        conditions = {False: "", True: " AND lease_token = %s"}
        self._complete_one = {
            is_leased: f"{self._complete}{condition} RETURNING id"
            for is_leased, condition in conditions.items()
        }
        """The statement that completes one job, by whether its row must have a lease."""

    # --- Transactions -----------------------------------------------------------------------------

    @contextmanager
    def transaction(
        self,
        *,
        savepoint: bool = True,
        durable: bool = False,
        calls_handlers: bool = False,
        waits_for_disk: bool = True,
        defers: bool = False,
    ) -> Iterator[None]:
        """Run the block in ``transaction.atomic()``, whose ``BEGIN`` takes no round trip.

        :param calls_handlers: whether code of the project's runs in it, so that psycopg has to
            begin it in its own way.
        """
        connection = connections[self.alias]
        block = transaction.atomic(using=self.alias, savepoint=savepoint, durable=durable)
        with block:
            along = _Along(self._execute, block, defers=defers and not calls_handlers)
            if len(connection.atomic_blocks) > 1:
                # In a worker's transaction the next query may have a savepoint of its handler's to
                # open, which is to have all of this within it.
                is_workers = any(map(_is_ours, connection.execute_wrappers))
                with self._together(along) if along.defers and not is_workers else nullcontext():
                    yield
                return
            opening = () if waits_for_disk else (_NO_WAIT_FOR_DISK,)
            # One that the caller commits is psycopg's to begin: it would stay in autocommit.
            is_plain = calls_handlers or not connection.commit_on_exit
            begins: AbstractContextManager[None] = nullcontext()
            if not is_plain:
                begins = begin_with_first_query(connection, opening)
            connection.execute_wrappers.append(along)
            try:
                with begins:
                    yield
                    if (along.before or along.leases) and not connection.needs_rollback:
                        before, along.before = along.before, []
                        self.execute_all(before, is_last=True)
            finally:
                connection.execute_wrappers.remove(along)
        for names, token in along.leases:  # the COMMIT could not take them along
            self.delete_leases(names, token)

    @contextmanager
    def _together(self, along: _Along) -> Iterator[None]:
        """Send what the block puts off in one round trip at its end, within the transaction of the
        caller's: what the database refuses of it is raised there."""
        wrappers = connections[self.alias].execute_wrappers
        wrappers.append(along)
        try:
            yield
            if along.before:  # also where the caller's transaction is broken: that raises, then
                before, along.before = along.before, []
                self.execute_all(before)
        finally:
            wrappers.remove(along)

    def execute_with_next(self, sql: str, values: Sequence[Any]) -> None:
        """Send it in front of the next query, or with the end, of a block of ``transaction``."""
        along, driver = self._along(), connections[self.alias].connection
        has_begun = driver is not None and driver.info.transaction_status != _IDLE
        # What begins a transaction must come first.
        if along is None or not (has_begun or along.defers):
            self._execute(sql, values)
        else:
            along.before.append((sql, values))

    @property
    def defers(self) -> bool:
        """In a block of ``transaction`` that is for that, and in no savepoint within it: what is
        undone with one must not be sent later."""
        along, blocks = self._along(), connections[self.alias].atomic_blocks
        return along is not None and along.defers and along.block is blocks[-1]

    def execute_alone(self, sql: str, values: Sequence[Any]) -> int:
        """Execute it in one round trip, its transaction included."""
        with self.transaction(waits_for_disk=False):
            (((changed,),),) = self.execute_all([(sql, values)], is_last=True)
        return int(changed)

    def _along(self) -> _Along | None:
        """Return what takes statements that go along in the present transaction, if it is ours. A
        timeout that was raised in between may have left that of another one."""
        connection = connections[self.alias]
        wrappers, blocks = connection.execute_wrappers, connection.atomic_blocks
        ours = (each for each in wrappers if isinstance(each, _Along))
        return next((each for each in ours if each.block in blocks), None)

    sends_several = True
    changing = ("set_config", "advisory_lock", "into temp")

    def end_session(self, connection: BaseDatabaseWrapper, *, terminates: bool) -> None:
        """End also a session whose server process is busy and does not see that its client is gone.

        Behind a pooler the process id may be somebody else's: only a session of this worker's name
        is ended.
        """
        pid = connection.connection.info.backend_pid
        super().end_session(connection, terminates=terminates)
        if terminates:
            self._execute(_TERMINATE, [pid])

    def _execute(self, sql: str, parameters: Sequence[Any]) -> list[Any]:
        """Execute a statement and return the rows it answers with; of one that answers with none,
        how many it has changed."""
        with connections[self.alias].cursor() as cursor:
            cursor.execute(sql, parameters)
            return _answer(cursor)

    def execute_all(
        self, statements: Sequence[_Statement], *, is_last: bool = False
    ) -> list[list[Any]]:
        """Execute statements in one round trip, where several may be sent as one, and return what
        each answers with, as ``_execute`` does.

        :param is_last: commit along with them, where the transaction is the caller's own.
        """
        with connections[self.alias].cursor() as cursor:
            if not takes_several(cursor.cursor):
                return [self._execute(*statement) for statement in statements]
            along = self._ending() if is_last else None
            leases = along.leases if along is not None else []
            text = "; ".join(
                [*(sql for sql, _ in statements), *([] if along is None else ["COMMIT"])]
            )
            values = [value for _, some in statements for value in some]
            for names, token in leases:
                text += f"; {_DELETE_FREE_LEASES}"
                values += names, token
            cursor.execute(text, values)
            found: list[list[Any]] = []
            for number in range(len(statements)):
                if number:
                    cursor.nextset()
                found.append(_answer(cursor))
            if along is not None:
                along.leases = _left_leases(cursor, leases, is_first=not statements)
            return found

    def _ending(self) -> _Along | None:
        """Return what goes along with the last statement and its COMMIT, which Django's own has
        nothing to do after; None where a COMMIT would not end the caller's transaction, or another
        one that was open before."""
        connection = connections[self.alias]
        if len(connection.atomic_blocks) != 1 or not connection.commit_on_exit:
            return None
        return self._along() or _Along(self._execute)

    # --- Markers of effects -----------------------------------------------------------------------

    def insert_markers(
        self, keys: Collection[EventKey], now: datetime | None = None
    ) -> set[EventKey]:
        """Insert all in one statement."""
        if not keys:
            return set()
        ordered = sorted(set(keys))
        parameters = _marker_parameters(ordered, now)
        with connections[self.alias].cursor() as cursor:
            cursor.execute(_INSERT_MARKERS, parameters)
            return _fresh(cursor, ordered, parameters[1], cursor.rowcount)

    # --- Rows of a group --------------------------------------------------------------------------

    def job_rows(self, ids: Sequence[str], *, lock: bool) -> dict[str, JobRow]:
        """Read rows without Django's converters; the server writes the ids as text."""
        with connections[self.alias].cursor() as cursor:
            read_times_natively(cursor)
            cursor.execute(_ROWS_LOCKED if lock else _ROWS, [text_array(ids)])
            return {row[-1]: JobRow(*row) for row in cursor.fetchall()}

    def job_rows_and_line(
        self, ids: Sequence[str], names: Sequence[str]
    ) -> tuple[dict[str, JobRow], Iterable[LineRow]]:
        """Read both in one round trip, where several statements may be sent as one."""
        with connections[self.alias].cursor() as cursor:
            if not takes_several(cursor.cursor):
                return super().job_rows_and_line(ids, names)
            read_times_natively(cursor)
            array = text_array(ids)
            cursor.execute(f"{_ROWS}; {_LINE}", [array, array, text_array(names)])
            rows = {row[-1]: JobRow(*row) for row in cursor.fetchall()}
            cursor.nextset()
            return rows, cursor.fetchall()

    def read_line(self, ids: Sequence[UUID | str], names: Sequence[str]) -> Iterable[LineRow]:
        """Read both in one statement."""
        return self._execute(_LINE, [array_text(ids), text_array(names)])

    def insert_markers_and_lock(
        self, keys: Sequence[EventKey], ids: Sequence[str], now: datetime | None = None
    ) -> tuple[set[EventKey], dict[str, JobRow]]:
        """Insert and lock in one round trip, where several statements may be sent as one."""
        with connections[self.alias].cursor() as cursor:
            if not keys or not ids or not takes_several(cursor.cursor):
                return super().insert_markers_and_lock(keys, ids, now)
            ordered = sorted(set(keys))
            parameters = _marker_parameters(ordered, now)
            read_times_natively(cursor)
            cursor.execute(f"{_INSERT_MARKERS}; {_ROWS_LOCKED}", [*parameters, text_array(ids)])
            inserted = cursor.rowcount
            cursor.nextset()
            found = {row[-1]: JobRow(*row) for row in cursor.fetchall()}
            return _fresh(cursor, ordered, parameters[1], inserted), found

    # --- Leases in rows ---------------------------------------------------------------------------

    def take_row_leases(
        self, rows: Sequence[JobRow], token: str, now: datetime, expires_at: datetime
    ) -> set[UUID]:
        """Take all leases in one statement."""
        if not rows:
            return set()
        ids = text_array([row.id_text for row in rows])
        judged: list[Any] = [
            ids,
            array_text(row.generation for row in rows),
            array_text(row.attempts for row in rows),
            [row.lease_token for row in rows],
            [row.lease_expires_at for row in rows],
        ]
        open_states = text_array(sorted(map(str, states.OPEN)))
        parameters = [ids, token, expires_at, now, *judged, ids, open_states]
        return {id for (id,) in self._execute(_TAKE_ROW_LEASES, parameters)}

    def release_row_leases(self, ids: Collection[UUID], token: str) -> None:
        """Lock the rows in one order first, as ``take_row_leases`` does."""
        if ids:
            array = array_text(ids)
            self._execute(_RELEASE_ROW_LEASES, [array, array, token])

    # --- Completions ------------------------------------------------------------------------------

    def complete(
        self,
        completions: Sequence[Completion],
        now: datetime,
        *,
        token: str | None = None,
        is_last: bool = False,
    ) -> set[UUID]:
        """Complete all in one statement, committed in the same round trip if it is the last."""
        if not completions:
            return set()
        statement = self._completion(completions, now, token)
        (written,) = self.execute_all([statement], is_last=is_last)
        return {id for (id,) in written}

    def _completion(
        self, completions: Sequence[Completion], now: datetime, token: str | None = None
    ) -> _Statement:
        """Return the statement that writes completions and answers with the ids of their jobs.

        For one, as nearly all are where jobs come now and then, it is the one that the server plans
        in half of the time.
        """
        if len(completions) == 1:
            (one,) = completions
            ttl = one.row.result_ttl if one.result_ttl is None else one.result_ttl
            return self._complete_one[token is not None], [
                *(now, one.worker, one.attempt, one.started_at, one.result),
                *(ttl, now + timedelta(milliseconds=ttl), *(one.place or NOWHERE)),
                *(one.row.id, one.row.generation, *(() if token is None else (token,))),
            ]
        ids = text_array([one.row.id_text for one in completions])
        results = [one.result for one in completions]
        lifetimes = [one.result_ttl for one in completions]
        workers = [one.worker for one in completions]
        # Of arrays that end early, unnest takes NULL for the rest. In a backlog the relay has
        # recorded all places.
        places: Sequence[Any] = ("{}",) * len(Place._fields)
        if any(one.place for one in completions):
            columns = zip(*(one.place or NOWHERE for one in completions), strict=True)
            places = list(map(list, columns))
        return _COMPLETE, [
            *(now, now, ids),
            array_text([one.row.generation for one in completions]),
            array_text([one.attempt for one in completions]),
            array_text([one.started_at for one in completions]),
            "{}" if results.count(None) == len(results) else results,
            "{}" if lifetimes.count(None) == len(lifetimes) else array_text(lifetimes),
            text_array(workers) if any(workers) else "{}",
            *places,
            *(ids, text_array(states.TRANSITIONS["complete"]), token, token),
        ]

    # --- Steps of workflows -----------------------------------------------------------------------

    def count_steps(
        self, changes: Mapping[int, StepCounts], completing: Completing = None
    ) -> list[tuple[UUID, StepCounts]]:
        """Complete in one round trip with locking and changing all in one statement."""
        if not changes:
            return super().count_steps(changes, completing)
        statements = self._completing(completing)
        found = self.execute_all([*statements, (_COUNT_STEPS, _count_parameters(changes))])
        if statements:
            refuse_uncompleted(len(found[0]), completing)
        return [(row[0], StepCounts(*row[1:])) for row in found[-1]]

    def _completing(self, completing: Completing) -> list[_Statement]:
        if completing is None:
            return []
        return [self._completion(*completing)]

    def lock_workflows(
        self,
        ids: Collection[UUID],
        changes: Mapping[int, StepCounts] | None = None,
        stages: Collection[UUID] = (),
        completing: Completing = None,
    ) -> tuple[list[Workflow], list[StageRow]]:
        """Complete, count, lock and read in one round trip. Each of the statements sees what others
        have committed until it began."""
        statements = self._completing(completing)
        if changes:
            statements.append((_COUNT_STEPS, _count_parameters(changes)))
        statements.append((_LOCK_WORKFLOWS, [array_text(ids)]))
        if stages:
            statements.append((_STAGES, _stage_parameters(stages)))
        found = self.execute_all(statements)
        if completing is not None:
            refuse_uncompleted(len(found[0]), completing)
        rows = _stage_rows(found.pop()) if stages else []
        return [Workflow.from_db(self.alias, _OF_WORKFLOWS, row) for row in found[-1]], rows

    def read_stages(self, ids: Collection[UUID]) -> list[StageRow]:
        """Read all in one statement."""
        return _stage_rows(self._execute(_STAGES, _stage_parameters(ids)))

    def write_advance(self, advance: Advance, *, is_last: bool = False) -> list[DueJob]:
        """Write all in one round trip, and commit in it if it is the last."""
        statements: list[_Statement] = []
        if advance.ended:
            statements.append((_END_STAGES, [advance.now, array_text(advance.ended)]))
        if advance.met:
            statements.append((_MEET_EDGES, [array_text(advance.met)]))
        before_leased = len(statements)
        if advance.lease is not None:
            values = [advance.now, *advance.lease, array_text(advance.reserved), advance.now]
            statements.append((_RELEASE_LEASED, values))
        if advance.released:
            statements.append((_RELEASE_STEPS, [advance.now, array_text(advance.released)]))
        for workflow in advance.workflows:
            values = [getattr(workflow, name) for name in WORKFLOW_COLUMNS]
            statements.append((_UPDATE_WORKFLOW, [*values, workflow.pk]))
        found = self.execute_all(statements, is_last=is_last) if statements else []
        if advance.lease is None:
            return []
        return self._with_headers(DueJob._make(row) for row in found[before_leased])

    # --- New jobs ---------------------------------------------------------------------------------

    def insert_jobs(self, jobs: Sequence[Job], *, ignore_conflicts: bool = False) -> int:
        """Store many rows by COPY, and few with the commit."""
        if ignore_conflicts:
            return super().insert_jobs(jobs, ignore_conflicts=True)
        if self.may_copy(len(jobs)):
            self.copy_rows("kjo_job", self._job_types(), map(self._values_of, jobs))
            return len(jobs)
        if not self.defers or len(jobs) >= COPY_FROM:
            return super().insert_jobs(jobs)
        begin, end = self._insert[False]
        values = [value for job in jobs for value in self._values_of(job)]
        self.execute_with_next(begin + ", ".join([JOB_PLACES] * len(jobs)) + end, values)
        return len(jobs)

    def insert_steps(
        self, rows: Sequence[Sequence[Model]], jobs: Sequence[Job], *, is_last: bool = False
    ) -> None:
        """Insert all in one round trip, and commit in it if it is the last."""
        if len(jobs) + sum(map(len, rows)) > MOST_TOGETHER:
            return super().insert_steps(rows, jobs, is_last=is_last)
        statements = [_insertion(each) for each in rows if each]
        if jobs:
            values = [value for job in jobs for value in self._values_of(job)]
            places = _places(len(self._columns), len(jobs))
            statements.append((self._insert[False][0] + places, values))
        if statements:
            self.execute_all(statements, is_last=is_last)

    def may_copy(self, count: int) -> bool:
        """Return whether there are enough rows for COPY, and no query wrapper but those of this
        package: others would be given what is not a text, and no values."""
        wrappers = connections[self.alias].execute_wrappers
        return count >= COPY_FROM and all(map(_is_ours, wrappers))

    def insert_alike(self, job: Job, contents: Sequence[tuple[UUID, str, bytes]]) -> None:
        """Store many rows by COPY."""
        if not self.may_copy(len(contents)):
            return super().insert_alike(job, contents)
        return self.copy_rows("kjo_job", self._job_types(), self._alike(job, contents))

    def _job_types(self) -> dict[str, str]:
        connection = connections[self.alias]
        return {
            str(field.column): str(field.db_type(connection)).partition("(")[0]
            for field in JOB_FIELDS
        }

    def copy_rows(
        self, table: str, types: Mapping[str, str], rows: Iterable[Sequence[Any]]
    ) -> None:
        """Write them in binary; the server stores some while the next are composed.

        Query wrappers are called as for any other query: that of a handler's savepoint opens it.
        """
        connection = connections[self.alias]
        names = ", ".join(f'"{column}"' for column in types)
        text = f"COPY {table} ({names}) FROM STDIN (FORMAT BINARY)"

        def copy(*query: Any) -> None:
            connection.validate_no_broken_transaction()
            with connection.wrap_database_errors, cursor.copy(text) as copying:
                copying.set_types(list(types.values()))
                for row in rows:
                    copying.write_row(row)

        with transaction.atomic(using=self.alias, savepoint=False), connection.cursor() as cursor:
            execute: Callable[..., Any] = copy
            for wrapper in reversed(connection.execute_wrappers):
                execute = partial(wrapper, execute)
            # Not a text, as whatever must be sent alone.
            sql = psycopg_module().sql.SQL(text)
            execute(sql, None, False, {"connection": connection, "cursor": cursor})

    # --- The relay --------------------------------------------------------------------------------

    has_independent_writers = True

    def due_jobs(
        self,
        queues: Collection[str],
        limit: int,
        without: Collection[UUID] = (),
        without_topics: Collection[str] = (),
        max_bytes: int = ANY_SIZE,
    ) -> list[DueJob]:
        """Execute a constant statement: building one by the ORM takes several times as long as the
        database takes to answer."""
        parameters: list[Any] = [
            max_bytes // limit,
            list(queues),
            list(without_topics),
            array_text(without),
        ]
        now = CLOCK.now()
        with connections[self.alias].cursor() as cursor:
            read_times_natively(cursor)
            cursor.execute(_DUE, [*parameters, now, now, limit])
            rows = cursor.fetchall()
        return self._with_headers(self._loaded(rows, max_bytes))

    def _with_headers(self, jobs: Iterable[DueJob]) -> list[DueJob]:
        connection = connections[self.alias]
        return [
            job._replace(headers=_read_headers(job.headers, None, connection))
            if job.headers is not None
            else job
            for job in jobs
        ]

    def next_due(
        self,
        queues: Collection[str],
        without: Collection[UUID] = (),
        without_topics: Collection[str] = (),
    ) -> datetime | None:
        """Execute a constant statement. An idle relay does nothing else: here it finds out that its
        server takes no writes any more."""
        leave_retired(self.alias)
        parameters = [list(queues), list(without_topics), array_text(without), CLOCK.now()]
        return next((due for (due,) in self._execute(_NEXT, parameters)), None)

    def awaiting_publish(self, ids: Iterable[UUID]) -> set[tuple[UUID, int, int, datetime]]:
        """Execute a constant statement."""
        return set(self._execute(_UNRECORDED, [array_text(ids)]))

    def record_published(self, published: Sequence[Publication], now: datetime) -> set[UUID]:
        """Record all in one round trip, at the server's time."""
        jobs = [one.job for one in published]
        ids = array_text([job.id for job in jobs])
        parameters = [
            ids,
            ids,
            array_text([job.generation for job in jobs]),
            array_text([job.attempts for job in jobs]),
            array_text([job.available_at for job in jobs]),
            text_array([one.topic for one in published]),
            array_text([one.partition for one in published]),
            array_text([one.offset for one in published]),
            states.TRANSITIONS["publish"],
            connections[self.alias].in_atomic_block,
            ids,
        ]
        return {id for (id,) in self._execute(_RECORD_PUBLISHED, parameters)}

    def complete_forwarded(self, published: Sequence[Publication], now: datetime) -> None:
        """Complete all in one statement."""
        if published:
            rows = [(job.id, job.generation, place, at) for job, _, place, at in published]
            columns = [array_text(column) for column in zip(*rows, strict=True)]
            self._execute(_COMPLETE_FORWARDED, [now, now, *columns, states.TRANSITIONS["complete"]])

    # --- Leases of coordination -------------------------------------------------------------------

    def claim_leases(
        self, names: Sequence[str], token: str, ttl: timedelta
    ) -> dict[str, tuple[bool, int]]:
        """Take what can be taken in one round trip, its transaction included. How often the leases
        of others were claimed takes another one."""
        now, array = CLOCK.now(), list(names)
        with self.transaction(durable=True, waits_for_disk=False):
            claim = _CLAIM_LEASES, [token, now + ttl, array, now, now]
            (taken,) = self.execute_all([claim], is_last=True)
        claims = {name: (True, deliveries) for name, deliveries in taken}
        if others := [name for name in names if name not in claims]:
            found = Lease.objects.using(self.alias).filter(name__in=others)
            counts = dict(found.values_list("name", "deliveries"))
            claims |= {name: (False, counts.get(name, 0)) for name in others}
        return claims

    def delete_leases(self, names: Sequence[str], token: str) -> None:
        """Delete them without waiting for the disk. Within a transaction that ``transaction`` has
        begun, in one round trip with its COMMIT, and behind that: locks on them would last until
        then, in an order that claims do not keep. Those that somebody has locked just then are
        deleted afterwards: nothing that waits, and may be refused for it, follows a COMMIT."""
        listed = list(names)
        along, blocks = self._along(), connections[self.alias].atomic_blocks
        if along is not None and along.block is blocks[0]:
            along.leases.append((listed, token))
        elif blocks:
            self._execute(_DELETE_LEASES, [listed, token])
        else:
            self._execute(_DELETE_LEASES_ALONE, [listed, token])

    # --- Limits -----------------------------------------------------------------------------------

    def read_windows(self, names: Sequence[str]) -> tuple[datetime, dict[str, str]]:
        """Read both in one query, unless no rate has any starts."""
        rows = self._execute(_READ_WINDOWS, [list(names)])
        if not rows:
            return self.server_time(), {}
        return rows[0][0], {name: starts for _, name, starts in rows}

    def write_windows(
        self, changes: Sequence[WindowChange]
    ) -> tuple[datetime, dict[str, str]] | None:
        """Lock, compare, and write or read in one query."""
        rows = self._execute(_WRITE_WINDOWS, [list(each) for each in zip(*changes, strict=True)])
        if not rows:
            return None
        return rows[0][0], {name: starts for _, name, starts in rows if starts is not None}

    has_clock = True

    def server_time(self) -> datetime:
        """Return the server's time: the clocks of several hosts may differ."""
        ((now,),) = self._execute("SELECT clock_timestamp()", ())
        return cast("datetime", now)

    # --- Sessions and wake-up calls ---------------------------------------------------------------

    has_notify = True

    def notify(self, payloads: Collection[str]) -> None:
        """Send all notifications in one query."""
        self._execute(_NOTIFY, [NOTIFY_CHANNEL, list(payloads)])

    def name_session(self, connection: BaseDatabaseWrapper, name: str) -> bool:
        """Put the name before one of the project's own; the server cuts what is too long.

        At the login a pooler gives another process id than the server does.
        """
        login = connection.connection.info
        own = login.parameter_status("application_name") or ""
        with connection.cursor() as cursor:
            cursor.execute(_NAME_SESSION, [name, own, login.backend_pid, own])
            return cursor.fetchone()[0] is not None

    def idle_transactions(self, prefix: str, width: int, since: timedelta) -> dict[int, str]:
        """Ask ``pg_stat_activity``."""
        return dict(self._execute(_IDLE_TRANSACTIONS, [width, f"{prefix}%", since.total_seconds()]))

    def end_sessions(self, pids: Sequence[int]) -> None:
        """Call ``pg_terminate_backend``."""
        self._execute(
            "SELECT pg_terminate_backend(pid) FROM unnest(%s::int[]) AS pid", [list(pids)]
        )

    def session_counts(self, prefix: str) -> tuple[int, int] | None:
        """Ask ``pg_stat_activity``."""
        ((named, others),) = self._execute(_SESSION_COUNTS, [f"{prefix}%", f"{prefix}%"])
        return named, others

    def streaming(self) -> AbstractContextManager[None]:
        """Return a transaction: behind a pooler in transaction mode a cursor at the server needs
        one, and elsewhere it is the cheaper for it."""
        return transaction.atomic(using=self.alias)


# --- Connections outside Django's care, and whether a pooler answers them ------------------------


def plain_connection(alias: str) -> psycopg.Connection[Any]:
    """Return a connection with Django's parameters, in autocommit, without Django's adapters and
    cursors; the server is not waited for long."""
    parameters = connections[alias].get_connection_params()
    # prepare_threshold stays: what is prepared is lost, or met by others, behind a pooler.
    for name in ("context", "cursor_factory"):
        parameters.pop(name, None)
    parameters.setdefault("connect_timeout", 5)
    connection: psycopg.Connection[Any] = psycopg_module().connect(**parameters, autocommit=True)
    return connection


def backend_pid(connection: psycopg.Connection[Any]) -> int:
    """Return the id of the server's process that serves the connection now."""
    row = connection.execute("SELECT pg_backend_pid()").fetchone()
    assert row is not None
    return int(row[0])


def lends_sessions(
    connection: psycopg.Connection[Any], connect: Callable[[], psycopg.Connection[Any]]
) -> bool:
    """Return whether a pooler in transaction mode stands before the server.

    A direct connection costs one query: the server names its process at the login. A pooler names
    something else. Then two connections ask alternately: in transaction mode both soon meet one
    session, or one connection meets two; in session mode each keeps its own. A pool in transaction
    mode that is so busy that neither happens is taken for one in session mode.

    :param connection: in autocommit, and without prepared statements.
    :param connect: makes another like it; used, and closed, only behind a pooler.
    """
    own = backend_pid(connection)
    if own == connection.info.backend_pid:
        return False
    with connect() as other:
        for _ in range(3):
            # One after the other: a pool of one session has none for a second transaction.
            if backend_pid(other) == own or backend_pid(connection) != own:
                return True
    return False


# --- Statements -----------------------------------------------------------------------------------


def _marker_parameters(keys: Sequence[EventKey], now: datetime | None) -> list[Any]:
    ids = array_text(map("{:032x}".format, uuid7_values(len(keys))))
    return [now or CLOCK.now(), ids, *map(text_array, zip(*keys, strict=True))]


def _fresh(cursor: Any, keys: Sequence[EventKey], minted: Any, inserted: int) -> set[EventKey]:
    """Return the keys that were new; that is asked only if some were and some were not.

    :param minted: the ids made for the markers.
    :param inserted: how many rows the statement inserted.
    """
    if inserted in (0, len(keys)):
        return set(keys) if inserted else set()
    cursor.execute(_MARKERS_OF_IDS, [minted])
    return {EventKey(*row) for row in cursor.fetchall()}


_INSERT_MARKERS = """INSERT INTO processed_events
    (id, event_id, service_name, event_type, processed_at, created_at, updated_at)
SELECT v.id, v.event_id, v.service_name, v.event_type, v.moment, v.moment, v.moment
FROM (
    SELECT *, %s::timestamptz AS moment
    FROM unnest(%s::uuid[], %s::text[], %s::text[], %s::text[])
        AS u (id, event_id, service_name, event_type)
) AS v ON CONFLICT DO NOTHING
"""
_MARKERS_OF_IDS = """
SELECT event_id, service_name, event_type FROM processed_events WHERE id = ANY(%s::uuid[])
"""
_ROWS = f"""
SELECT {", ".join(COLUMNS)}, id::text FROM kjo_job WHERE id = ANY(%s::uuid[])
ORDER BY kjo_job.id
"""  # noqa: S608 - names of columns
_ROWS_LOCKED = f"{_ROWS} FOR NO KEY UPDATE"
# Of each limit the first row is enough: thousands may stand in line.
_LINE = """
SELECT job_id, "limit", is_released FROM kjo_held_job WHERE job_id = ANY(%s::uuid[])
UNION ALL
SELECT NULL, name, FALSE FROM unnest(%s::text[]) AS wanted (name)
WHERE EXISTS (SELECT 1 FROM kjo_held_job WHERE "limit" = wanted.name)
"""

# Locked in one order first: two workers that want the same rows wait for each other, and no more.
# What is asked of a row is hidden from the planner in a CASE. Statistics that say that hardly a row
# is open, or holds this lease, made it begin with those and compare each with each of the group's.
# The ids stand there twice so that it looks them up, and reads no small table from end to end.
_TAKE_ROW_LEASES = """
WITH locked AS MATERIALIZED (
    SELECT id FROM kjo_job WHERE id = ANY(%s::uuid[]) ORDER BY id FOR NO KEY UPDATE
)
UPDATE kjo_job SET lease_token = %s, lease_expires_at = %s, started_at = %s
FROM locked JOIN unnest(%s::uuid[], %s::int[], %s::int[], %s::text[], %s::timestamptz[])
    AS v (id, generation, attempts, lease_token, lease_expires_at) ON v.id = locked.id
WHERE kjo_job.id = ANY(%s::uuid[]) AND kjo_job.id = locked.id AND CASE
    WHEN kjo_job.generation = v.generation AND kjo_job.attempts = v.attempts
        AND kjo_job.lease_token = v.lease_token
        AND kjo_job.lease_expires_at IS NOT DISTINCT FROM v.lease_expires_at
        AND kjo_job.state = ANY(%s) THEN true ELSE false END
RETURNING kjo_job.id
"""
_RELEASE_ROW_LEASES = """
WITH locked AS MATERIALIZED (
    SELECT id FROM kjo_job WHERE id = ANY(%s::uuid[]) ORDER BY id FOR NO KEY UPDATE
)
UPDATE kjo_job SET lease_token = '', lease_expires_at = NULL, started_at = NULL
FROM locked WHERE kjo_job.id = ANY(%s::uuid[]) AND kjo_job.id = locked.id
    AND CASE WHEN kjo_job.lease_token = %s THEN true ELSE false END
"""

_COMPLETE = """
UPDATE kjo_job SET state = 'completed', attempts = v.attempts, started_at = v.started_at,
    finished_at = %s, result = v.result, error = '', lease_token = '', lease_expires_at = NULL,
    worker = COALESCE(v.worker, ''), result_ttl = COALESCE(v.result_ttl, kjo_job.result_ttl),
    result_expires_at = %s::timestamptz
        + COALESCE(v.result_ttl, kjo_job.result_ttl) * interval '1 millisecond',
    topic = COALESCE(v.topic, kjo_job.topic), partition = COALESCE(v.partition, kjo_job.partition),
    "offset" = COALESCE(v.position, kjo_job."offset"),
    queued_at = COALESCE(v.queued_at, kjo_job.queued_at)
FROM unnest(%s::uuid[], %s::int[], %s::int[], %s::timestamptz[], %s::bytea[], %s::bigint[],
            %s::text[], %s::text[], %s::int[], %s::bigint[], %s::timestamptz[])
    AS v (id, generation, attempts, started_at, result, result_ttl, worker,
          topic, partition, position, queued_at)
WHERE kjo_job.id = ANY(%s::uuid[]) AND kjo_job.id = v.id AND CASE
    WHEN kjo_job.generation = v.generation AND kjo_job.state = ANY(%s)
        AND (%s::text IS NULL OR kjo_job.lease_token = %s) THEN true ELSE false END
RETURNING kjo_job.id
"""

_Statement = tuple[str, Sequence[Any]]
"""A statement and its parameters."""


def _left_leases(
    cursor: Any, leases: Sequence[tuple[list[str], str]], *, is_first: bool
) -> list[tuple[list[str], str]]:
    """Return those leases of which not all were deleted behind a COMMIT.

    :param cursor: at the result in front of that of the COMMIT.
    :param is_first: whether the COMMIT was the first of the text.
    """
    if not is_first:
        cursor.nextset()
    left = []
    for names, token in leases:
        cursor.nextset()
        if cursor.rowcount < len(names):
            left.append((names, token))
    return left


def _answer(cursor: Any) -> list[Any]:
    """Return the rows of a cursor's present result, or how many rows its statement has changed."""
    # Of psycopg's result: a description of its columns takes longer than reading a row of them.
    return list(cursor.fetchall()) if cursor.pgresult.nfields else [(cursor.rowcount,)]


def _count_parameters(changes: Mapping[int, StepCounts]) -> list[Any]:
    keys = array_text(changes)
    return [keys, keys, *map(array_text, zip(*changes.values(), strict=True))]


def _stage_parameters(ids: Collection[UUID]) -> list[Any]:
    return [len(ids) + 1, array_text(ids)]


def _stage_rows(rows: Iterable[Sequence[Any]]) -> list[StageRow]:
    """Return the stages of ``_STAGES``, which has a row for each that waits for one of them."""
    found: dict[UUID, StageRow] = {}
    for row in rows:
        stage = found.setdefault(row[0], StageRow(*row[:6]))
        if row[6] is not None:
            stage.followers.append(FollowerRow(*row[6:]))
    return list(found.values())


_COUNT_STEPS = """
WITH locked AS MATERIALIZED (
    SELECT id FROM kjo_workflow_count WHERE id = ANY(%s::bigint[]) ORDER BY id FOR NO KEY UPDATE
)
UPDATE kjo_workflow_count AS c SET open_count = c.open_count + v.opened,
    failed_count = c.failed_count + v.failed, cancelled_count = c.cancelled_count + v.cancelled
FROM locked JOIN unnest(%s::bigint[], %s::int[], %s::int[], %s::int[])
    AS v (id, opened, failed, cancelled) ON v.id = locked.id
WHERE c.id = locked.id
RETURNING c.stage_id, c.open_count, c.failed_count, c.cancelled_count
"""
_OF_WORKFLOWS = [field.attname for field in Workflow._meta.concrete_fields]
_LOCK_WORKFLOWS = f"""
SELECT {", ".join(_OF_WORKFLOWS)} FROM kjo_workflow WHERE id = ANY(%s::uuid[])
ORDER BY id FOR NO KEY UPDATE
"""  # noqa: S608 - names of columns
# More unmet edges of a follower than there are stages need not be counted: it waits for others.
_STAGES = f"""
SELECT s.id, s.workflow_id, s.handler, s.finished_at, n.opened, n.bad,
    e.id, f.id, {", ".join(f"f.{name}" for name in FollowerRow._fields[2:-2])},
    (SELECT count(*) FROM (
        SELECT 1 FROM kjo_workflow_edge AS u WHERE u.stage_id = f.id AND NOT u.is_met LIMIT %s
    ) AS unmet),
    ARRAY(SELECT c.id FROM kjo_workflow_count AS c WHERE c.stage_id = f.id ORDER BY c.id)
FROM kjo_workflow_stage AS s
CROSS JOIN LATERAL (
    SELECT sum(open_count) AS opened, sum(failed_count + cancelled_count) AS bad
    FROM kjo_workflow_count WHERE stage_id = s.id
) AS n
LEFT JOIN kjo_workflow_edge AS e
    ON e.required_id = s.id AND NOT e.is_met AND (n.bad > 0 OR n.opened = 0)
LEFT JOIN kjo_workflow_stage AS f ON f.id = e.stage_id
WHERE s.id = ANY(%s::uuid[]) ORDER BY s.id, e.id
"""  # noqa: S608 - names of columns
_END_STAGES = "UPDATE kjo_workflow_stage SET finished_at = %s WHERE id = ANY(%s::uuid[])"
_MEET_EDGES = "UPDATE kjo_workflow_edge SET is_met = true WHERE id = ANY(%s::bigint[])"
_RELEASE_STEPS = f"""
UPDATE kjo_job SET state = '{states.RESULT_OF["release"]}',
    available_at = GREATEST(available_at, %s)
WHERE stage_id = ANY(%s::uuid[])
    AND CASE WHEN state = '{states.TRANSITIONS["release"][0]}' THEN true ELSE false END
"""  # noqa: S608 - names of states
# In front of the one above, which releases what has not been leased here.
_RELEASE_LEASED = f"""
UPDATE kjo_job SET state = '{states.RESULT_OF["release"]}',
    available_at = %s, lease_token = %s, lease_expires_at = %s
WHERE stage_id = ANY(%s::uuid[]) AND CASE
    WHEN state = '{states.TRANSITIONS["release"][0]}' AND key = '' AND priority IS NULL
        AND available_at <= %s THEN true ELSE false END
RETURNING {", ".join(DueJob._fields)}
"""  # noqa: S608 - names of states and columns
_UPDATE_WORKFLOW = f"""
UPDATE kjo_workflow SET {", ".join(f"{name} = %s" for name in WORKFLOW_COLUMNS)} WHERE id = %s
"""  # noqa: S608 - names of columns

_read_headers: Any = Job._meta.get_field("headers").from_db_value

# What is due is few, a queue's jobs are millions: no plan is to begin with the queue, so its name
# and the topic's are hidden in an expression. Of this one PostgreSQL expects that nearly every row
# meets it, so it follows the index as far as the limit goes. Expecting few, it would sort the whole
# backlog for every batch. The states are spelled out for the partial index.
_WAITING = f"""FROM kjo_job
WHERE state IN ({", ".join(f"'{state.value}'" for state in states.AWAITING_PUBLISH)})
    AND array_position(%s::text[], CASE WHEN
        array_position(%s::text[], destination::text) IS NULL THEN queue::text END) IS NOT NULL
    AND id NOT IN (SELECT unnest(%s::uuid[]))
    AND (lease_expires_at IS NULL OR lease_expires_at <= %s)"""
_DUE_COLUMNS = ", ".join(DueJob._fields).replace(
    "payload", "CASE WHEN length(payload) <= %s THEN payload END"
)
_DUE = f"""SELECT {_DUE_COLUMNS}, length(payload) {_WAITING} AND available_at <= %s
ORDER BY available_at, id LIMIT %s"""
_NEXT = f"SELECT available_at {_WAITING} ORDER BY available_at LIMIT 1"
_UNRECORDED = f"""SELECT id, generation, attempts, available_at FROM kjo_job
WHERE state IN ({", ".join(f"'{state.value}'" for state in states.AWAITING_PUBLISH)})
    AND id = ANY(%s::uuid[])"""  # noqa: S608 - names of states

# The rows are found and locked first, by their ids: the planner expects hardly any row in these
# states, and would compare each with each. Nobody waits for the disk: what a crash of the
# server loses is published and recorded again.
_RECORD_PUBLISHED = """
WITH free AS MATERIALIZED (
    SELECT id, generation, attempts, available_at, state FROM kjo_job WHERE id = ANY(%s::uuid[])
    FOR NO KEY UPDATE SKIP LOCKED
), sent AS MATERIALIZED (
    SELECT v.id, v.topic, v.partition, v.position
    FROM unnest(%s::uuid[], %s::int[], %s::int[], %s::timestamptz[], %s::text[], %s::int[],
                %s::bigint[])
        AS v (id, generation, attempts, available_at, topic, partition, position)
    JOIN free USING (id)
    WHERE free.generation = v.generation AND free.attempts = v.attempts AND free.state = ANY(%s)
        AND free.available_at = COALESCE(v.available_at, free.available_at)
), recorded AS (
    UPDATE kjo_job SET state = 'queued', topic = sent.topic, partition = sent.partition,
        "offset" = sent.position, queued_at = now()
    FROM sent, set_config(
        'synchronous_commit',
        CASE WHEN %s THEN current_setting('synchronous_commit') ELSE 'off' END, true
    ) WHERE kjo_job.id = sent.id
)
SELECT id FROM unnest(%s::uuid[]) AS v (id) EXCEPT SELECT id FROM free
"""
_COMPLETE_FORWARDED = """
UPDATE kjo_job SET state = 'completed', topic = kjo_job.destination, partition = v.partition,
    "offset" = v.position, queued_at = %s, finished_at = %s, error = '',
    attempts = kjo_job.attempts + 1
FROM unnest(%s::uuid[], %s::int[], %s::int[], %s::bigint[])
    AS v (id, generation, partition, position)
WHERE kjo_job.id = v.id AND kjo_job.generation = v.generation AND kjo_job.state = ANY(%s)
    AND kjo_job.destination <> ''
"""

_NO_WAIT_FOR_DISK = "SET LOCAL synchronous_commit TO off"
# The arrays are in one order, so that two who claim do not deadlock. A lease that is neither free
# nor the claimer's is not answered.
_CLAIM_LEASES = """
INSERT INTO kjo_lease AS lease (name, token, expires_at, deliveries)
SELECT name, %s, %s, 1 FROM unnest(%s::text[]) AS claimed (name)
ON CONFLICT (name) DO UPDATE SET token = excluded.token, expires_at = excluded.expires_at,
    deliveries = lease.deliveries + CASE WHEN lease.expires_at <= %s THEN 1 ELSE 0 END
    WHERE lease.expires_at <= %s OR lease.token = excluded.token
RETURNING name, deliveries
"""
_DELETE_LEASES = "DELETE FROM kjo_lease WHERE name = ANY(%s) AND token = %s"
# Alone in its transaction, which does not wait for the disk then.
_DELETE_LEASES_ALONE = """
DELETE FROM kjo_lease USING set_config('synchronous_commit', 'off', true)
WHERE name = ANY(%s) AND token = %s
"""
_DELETE_FREE_LEASES = """
DELETE FROM kjo_lease WHERE ctid = ANY(ARRAY(
    SELECT lease.ctid FROM kjo_lease AS lease, set_config('synchronous_commit', 'off', true)
    WHERE name = ANY(%s) AND token = %s FOR UPDATE OF lease SKIP LOCKED
))
"""
_NOTIFY = "SELECT pg_notify(%s, payload) FROM unnest(%s::text[]) AS payload"
_READ_WINDOWS = """
SELECT clock_timestamp(), name, starts FROM kjo_rate_window WHERE name = ANY(%s)
"""
# The rows are locked in one order. They are compared as they are once they are locked; no row is
# answered if all were written.
_WRITE_WINDOWS = """
WITH change AS (
    SELECT * FROM unnest(%s::text[], %s::text[], %s::text[], %s::timestamptz[])
        AS v (name, before, starts, expires_at)
), locked AS (
    SELECT name, starts FROM kjo_rate_window WHERE name IN (SELECT name FROM change)
    ORDER BY name FOR NO KEY UPDATE
), written AS (
    UPDATE kjo_rate_window AS w
    SET starts = change.starts, expires_at = coalesce(change.expires_at, w.expires_at)
    FROM change
    WHERE w.name = change.name AND (SELECT count(*) FROM change) = (
        SELECT count(*) FROM locked JOIN change USING (name) WHERE locked.starts = change.before
    )
    RETURNING w.name
)
SELECT clock_timestamp(), name, locked.starts FROM change LEFT JOIN locked USING (name)
WHERE NOT EXISTS (SELECT FROM written)
"""
_NAME_SESSION = """
SELECT CASE WHEN is_safe THEN set_config('application_name', left(%s || ' ' || %s, 63), false) END
FROM (SELECT pg_backend_pid() = %s OR %s <> '' AS is_safe) AS session
"""
_IDLE_TRANSACTIONS = """
SELECT pid, left(application_name, %s) FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE %s AND xact_start IS NOT NULL
    AND state_change < now() - make_interval(secs => %s) AND pid <> pg_backend_pid()
"""
_TERMINATE = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = %s
    AND pid <> pg_backend_pid() AND application_name LIKE 'kjo-%%'
    AND application_name = current_setting('application_name')
"""
_SESSION_COUNTS = """
SELECT count(*) FILTER (WHERE application_name LIKE %s),
    count(*) FILTER (WHERE application_name NOT LIKE %s)
FROM pg_stat_activity WHERE datname = current_database()
"""
