"""What is taken over of Celery beat: its setting, and the tables of django-celery-beat.

Neither is installed: the objects and tables are made here as Celery and django-celery-beat make
them.
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection
from django.db.models import DateTimeField

from kjo_django import job
from kjo_django.models import Schedule
from kjo_django.schedules.celery_beat import take_over
from tests.schedules.conftest import minutes, now

pytestmark = pytest.mark.django_db


def crontab(
    minute: Any = "*",
    hour: Any = "*",
    day_of_week: Any = "*",
    day_of_month: Any = "*",
    month_of_year: Any = "*",
) -> Any:
    """As ``celery.schedules.crontab`` keeps what it was given."""
    fields = dict(locals().items())
    return SimpleNamespace(**{f"_orig_{name}": value for name, value in fields.items()})


class solar:
    def __init__(self, event: str, lat: float, lon: float) -> None:
        self.event = event


@pytest.fixture(autouse=True)
def tasks(jobs: None) -> None:
    @job(name="shop.send")
    def send(to: str, subject: str = "", urgent: bool = False) -> None: ...

    @job(name="old.tasks.rebuild")
    def rebuild() -> None: ...


def taken(answers: list[dict[str, Any]]) -> dict[str, bool]:
    return {one["name"]: one["is_taken"] for one in answers}


def remarks(answers: list[dict[str, Any]]) -> dict[str, str]:
    return {one["name"]: " ".join(one["remarks"]) for one in answers}


def row(name: str) -> Schedule:
    return Schedule.objects.get(name=name)


def test_the_setting(settings, clock):
    settings.CELERY_TIMEZONE = "Europe/Berlin"
    settings.CELERY_BEAT_SCHEDULE = {
        "seconds": {"task": "shop.tasks.send", "schedule": 30.0, "args": ("ann", "hello")},
        "delta": {
            "task": "shop.send",
            "schedule": timedelta(hours=2),
            "kwargs": {"to": "bob"},
            "options": {"queue": "ledger", "expires": 120, "priority": 3},
        },
        "cron": {
            "task": "old.tasks.rebuild",
            "schedule": crontab(minute=30, hour="7,19", day_of_week="monday-friday"),
        },
        "sets": {"task": "old.tasks.rebuild", "schedule": crontab(minute={0, 30}, hour={8, 9})},
        "every": {
            "task": "old.tasks.rebuild",
            "schedule": SimpleNamespace(run_every=timedelta(seconds=9)),
        },
        "until": {
            "task": "old.tasks.rebuild",
            "schedule": 60,
            "options": {"expires": datetime(2030, 1, 1, tzinfo=UTC), "queue": "celery"},
        },
        "both-days": {
            "task": "old.tasks.rebuild",
            "schedule": crontab(minute=0, hour=0, day_of_month="1-7", day_of_week="mon"),
        },
        "sun": {"task": "old.tasks.rebuild", "schedule": solar("sunset", 1, 2)},
        "half": {"task": "old.tasks.rebuild", "schedule": 0.5},
        "gone": {"task": "shop.tasks.unknown", "schedule": 60},
        "many": {"task": "old.tasks.rebuild", "schedule": 60, "args": [1, 2]},
        "celery.backend_cleanup": {"task": "celery.backend_cleanup", "schedule": crontab("0", "4")},
        "nonsense": "every day",
    }
    answers = take_over()
    assert taken(answers) == {
        **dict.fromkeys(["seconds", "delta", "cron", "sets", "every", "until"], True),
        **dict.fromkeys(["both-days", "sun", "half", "gone", "many"], False),
        **dict.fromkeys(["celery.backend_cleanup", "nonsense"], False),
    }
    said = remarks(answers)
    assert "cron when either does" in said["both-days"]
    assert "kind 'solar' is not known" in said["sun"]
    assert "whole seconds" in said["half"]
    assert "No job is named 'shop.tasks.unknown'" in said["gone"]
    assert "2 arguments by place" in said["many"]
    assert "kjo_prune" in said["celery.backend_cleanup"]
    assert said["delta"] == "priority is left out: 3"
    assert said["until"] == "No queue is named 'celery': its jobs go to the job's own."
    # And what was taken over is what the task was
    assert (row("seconds").job, row("seconds").every) == ("shop.send", 30)
    assert row("seconds").payload == {"to": "ann", "subject": "hello"}
    delta = row("delta")
    assert (delta.every, delta.queue, delta.expires_after) == (7200, "ledger", 120)
    assert (row("cron").cron, row("cron").timezone) == ("30 7,19 * * MON-FRI", "Europe/Berlin")
    assert row("sets").cron == "0,30 8,9 * * *"
    assert row("every").every == 9
    assert row("until").ends_at == datetime(2030, 1, 1, tzinfo=UTC)
    # Once more, nothing is taken twice
    assert set(taken(take_over()).values()) == {False}
    assert Schedule.objects.count() == 6


def test_names_of_jobs_may_be_given_and_nothing_is_stored_in_a_dry_run(settings):
    settings.CELERY_BEAT_SCHEDULE = {"gone": {"task": "x.y", "schedule": 60}}
    assert taken(take_over(jobs={"x.y": "old.tasks.rebuild"}, dry_run=True)) == {"gone": True}
    assert not Schedule.objects.exists()
    out = io.StringIO()
    call_command(
        *("kjo_schedule", "import-celery-beat", "--job", "x.y=old.tasks.rebuild"), stdout=out
    )
    assert out.getvalue() == "gone: taken over\n"
    assert row("gone").job == "old.tasks.rebuild"


BEAT = {"elsewhere": {"task": "old.tasks.rebuild", "schedule": 5}}


def test_a_dict_elsewhere(settings):
    assert taken(take_over("tests.schedules.test_celery_beat.BEAT")) == {"elsewhere": True}


# --- The tables -----------------------------------------------------------------------------------

DDL = """
CREATE TABLE django_celery_beat_intervalschedule
    (id integer PRIMARY KEY, every integer NOT NULL, period varchar(24) NOT NULL);
CREATE TABLE django_celery_beat_crontabschedule
    (id integer PRIMARY KEY, minute varchar(240) NOT NULL, hour varchar(96) NOT NULL,
     day_of_week varchar(64) NOT NULL, day_of_month varchar(124) NOT NULL,
     month_of_year varchar(64) NOT NULL, timezone varchar(63) NOT NULL);
CREATE TABLE django_celery_beat_solarschedule
    (id integer PRIMARY KEY, event varchar(24) NOT NULL, latitude decimal NOT NULL,
     longitude decimal NOT NULL);
CREATE TABLE django_celery_beat_clockedschedule
    (id integer PRIMARY KEY, clocked_time {moment} NOT NULL);
CREATE TABLE django_celery_beat_periodictask
    (id integer PRIMARY KEY, name varchar(200) NOT NULL UNIQUE, task varchar(200) NOT NULL,
     args text NOT NULL, kwargs text NOT NULL, queue varchar(200), exchange varchar(200),
     routing_key varchar(200), headers text NOT NULL, priority integer, expires {moment},
     expire_seconds integer, one_off bool NOT NULL, start_time {moment}, enabled bool NOT NULL,
     last_run_at {moment}, total_run_count integer NOT NULL, date_changed {moment} NOT NULL,
     description text NOT NULL, interval_id integer, crontab_id integer, solar_id integer,
     clocked_id integer);
INSERT INTO django_celery_beat_intervalschedule VALUES (1, 10, 'minutes'), (2, 5, 'microseconds');
INSERT INTO django_celery_beat_crontabschedule VALUES
    (1, '0', '3', 'mon', '*', '*', 'Europe/Berlin'), (2, '0', '[8, 20]', '*', '*', '*', 'UTC'),
    (3, '0', '0', '0', '1', '*', 'UTC');
INSERT INTO django_celery_beat_solarschedule VALUES (1, 'sunset', 1, 2);
INSERT INTO django_celery_beat_clockedschedule VALUES (1, '2031-01-01 00:00:00');
"""


def moment_type() -> str:
    """Return the type of the columns that Django makes for a moment on this database."""
    return str(DateTimeField().db_type(connection))


@pytest.fixture
def no_tables() -> Iterator[None]:
    """Drop the tables of django-celery-beat after the test."""
    yield
    with connection.cursor() as cursor:
        for name in connection.introspection.table_names(cursor):
            if name.startswith("django_celery_beat_"):
                cursor.execute(f"DROP TABLE {name}")


@pytest.fixture
def tables(no_tables: None) -> Iterator[Any]:
    """The tables of django-celery-beat, and what inserts a task."""
    columns = {
        "args": "[]",
        "kwargs": "{}",
        "headers": "{}",
        "one_off": False,
        "enabled": True,
        "total_run_count": 0,
        "date_changed": "2026-01-01",
        "description": "",
    }
    with connection.cursor() as cursor:
        for statement in filter(None, DDL.split(";\n")):
            cursor.execute(statement.format(moment=moment_type()))

        ids = itertools.count(1)

        def insert(name: str, task: str = "old.tasks.rebuild", **own: Any) -> None:
            values = {"id": next(ids), "name": name, "task": task, **columns, **own}
            cursor.execute(
                f"INSERT INTO django_celery_beat_periodictask ({', '.join(values)})"
                f" VALUES ({', '.join(['%s'] * len(values))})",
                list(values.values()),
            )

        yield insert


@pytest.mark.django_db(transaction=True)
def test_the_tables(tables, clock):
    tables("interval", interval_id=1, last_run_at=(now() - minutes(4)).replace(tzinfo=None))
    tables("cron", crontab_id=1, enabled=False, task="shop.tasks.send", args='["ann", "hi"]')
    tables("list", crontab_id=2, expire_seconds=90, queue="ledger", start_time="2030-01-01")
    tables("until", crontab_id=2, expires="2030-01-01", priority=5, routing_key="x", headers="{}")
    tables("moment", clocked_id=1, one_off=True, kwargs='{"to": "bob"}', task="shop.send")
    tables("a: name", interval_id=1)
    tables("sun", solar_id=1)
    tables("both-days", crontab_id=3)
    tables("fast", interval_id=2)
    tables("once", interval_id=1, one_off=True)
    tables("none")
    tables("garbage", interval_id=1, args="[1")
    tables("gone", interval_id=1, task="no.such.task")
    tables("celery.backend_cleanup", crontab_id=2, task="celery.backend_cleanup")
    answers = take_over()
    assert taken(answers) == {
        **dict.fromkeys(["interval", "cron", "list", "until", "moment", "a: name"], True),
        **dict.fromkeys(["sun", "both-days", "fast", "once", "none", "garbage"], False),
        **dict.fromkeys(["gone", "celery.backend_cleanup"], False),
    }
    said = remarks(answers)
    assert "no solar schedules (sunset)" in said["sun"]
    assert "not JSON" in said["garbage"]
    assert said["until"] == "routing_key is left out: 'x' priority is left out: 5"
    assert "'a- name'" in said["a: name"]
    # The interval goes on from its last run
    assert (row("interval").every, row("interval").next_at) == (600, now() + minutes(6))
    assert (row("cron").cron, row("cron").timezone) == ("0 3 * * MON", "Europe/Berlin")
    assert (row("cron").is_paused, row("cron").payload) == (True, {"to": "ann", "subject": "hi"})
    assert row("list").cron == "0 8,20 * * *"
    assert (row("list").expires_after, row("list").queue) == (90, "ledger")
    assert row("list").starts_at == datetime(2030, 1, 1, tzinfo=UTC)
    assert row("until").ends_at == datetime(2030, 1, 1, tzinfo=UTC)
    assert (row("moment").at, row("moment").payload) == (
        *(datetime(2031, 1, 1, tzinfo=UTC), {"to": "bob"}),
    )


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("no_tables")
def test_the_tables_of_an_old_release(clock):
    """Release 1.1 had neither clocked schedules nor most columns."""
    with connection.cursor() as cursor:
        cursor.execute("""CREATE TABLE django_celery_beat_intervalschedule
            (id integer PRIMARY KEY, every integer, period varchar(24))""")
        cursor.execute(f"""CREATE TABLE django_celery_beat_periodictask (id integer PRIMARY KEY,
            name varchar(200), task varchar(200), args text, kwargs text, queue varchar(200),
            expires {moment_type()}, enabled bool, interval_id integer, crontab_id integer)""")
        cursor.execute("INSERT INTO django_celery_beat_intervalschedule VALUES (1, 2, 'hours')")
        cursor.execute("""INSERT INTO django_celery_beat_periodictask VALUES
            (1, 'x', 'old.tasks.rebuild', '[]', '{}', NULL, NULL, true, 1, NULL)""")
    out = io.StringIO()
    call_command("kjo_schedule", "import-celery-beat", "--json", stdout=out)
    assert json.loads(out.getvalue())["imported"] == [
        {"name": "x", "is_taken": True, "remarks": []}
    ]
    assert row("x").every == 7200
