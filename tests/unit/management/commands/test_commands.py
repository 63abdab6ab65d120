"""Commands parse, delegate and show: exit codes, JSON, and errors that say what to do."""

from __future__ import annotations

import io
import json
import re
from argparse import ArgumentTypeError
from datetime import timedelta

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from kjo_django import registry
from kjo_django.management.commands import _shared
from kjo_django.messages import headers as names
from kjo_django.models import DeadLetter, Job
from kjo_django.transports.base import OutgoingRecord
from tests.factories import DeadLetterFactory, JobFactory, QueueControlFactory, WorkerFactory
from tests.ledger.workflows import ended, imported
from tests.unit.deliveries import on_memory

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def memory(settings):
    queues = {"emails": {"topic": "email-queue", "topic_options": {"partitions": 2}}}
    with on_memory(settings, QUEUES=queues) as transport:
        yield transport


def run(*args):
    """Return what was printed; SystemExit and CommandError pass through."""
    out = io.StringIO()
    call_command(*args, stdout=out, stderr=io.StringIO())
    return out.getvalue()


def run_json(*args):
    return json.loads(run(*args, "--json"))


# --- kjo_replay_dlq -----------------------------------------------------------------------------


def test_replay_replays_the_table_by_default():
    DeadLetterFactory(of_job=True)
    answer = run_json("kjo_replay_dlq")
    assert (answer["replayed"], answer["ok"], answer["source"]) == (1, True, "table")
    assert Job.objects.get().generation == 2


@pytest.mark.parametrize(
    "filter",
    [
        ["--queue", "emails"],
        ["--type", "tests.mail"],
        ["--reason", "fatal"],
        ["--error", "refused"],
        ["--fingerprint", "f00"],
        ["--since", "2h"],
    ],
)
def test_replay_filters(filter):
    """KII-30."""
    wanted = DeadLetterFactory(
        queue="emails",
        handler="tests.mail",
        reason="fatal",
        error="connection refused",
        fingerprint="f00",
    )
    DeadLetterFactory(failed_at=timezone.now() - timedelta(days=1))
    assert run_json("kjo_replay_dlq", *filter)["replayed"] == 1
    assert DeadLetter.objects.get(state="replayed") == wanted


def test_replay_takes_ids_a_limit_and_a_dry_run():
    letters = DeadLetterFactory.create_batch(3)
    ids = ["--id", str(letters[0].pk), "--id", str(letters[1].pk)]
    dry = run_json("kjo_replay_dlq", *ids, "--dry-run")
    assert (dry["matched"], dry["replayed"], dry["dry_run"]) == (2, 0, True)
    assert run_json("kjo_replay_dlq", *ids, "--limit", "1")["replayed"] == 1
    assert "2 dead letters match, 0 would be refused; nothing was changed" in run(
        "kjo_replay_dlq", "--dry-run"
    )


def test_replay_refuses_an_id_that_no_dead_letter_has():
    """A script that mistypes one must not be told that all is well."""
    letter, closed = DeadLetterFactory(of_job=True), DeadLetterFactory(discarded=True)
    unknown = "01a1f88a-4ee1-78fa-96b9-334916d6347a"
    with pytest.raises(CommandError, match=f"No dead letter has the id {unknown}") as raised:
        run("kjo_replay_dlq", "--id", str(letter.pk), "--id", unknown)
    assert raised.value.returncode == 2
    letter.refresh_from_db()
    assert letter.state == "open"
    # And one that is closed already is skipped, so that an interrupted run can be run again
    answer = run_json("kjo_replay_dlq", "--id", str(letter.pk), "--id", str(closed.pk))
    assert (answer["replayed"], answer["skipped"]) == (1, 1)
    assert answer["samples"][0]["detail"] == "it is discarded already"


def test_replay_from_a_topic_names_an_id_that_no_record_has(memory):
    memory.publish([OutgoingRecord("email-queue-dlq", b"{}", headers={names.ID: b"m-1"})])
    source = ("kjo_replay_dlq", "--source", "topic", "--topic", "email-queue-dlq")
    with pytest.raises(CommandError, match="No record of email-queue-dlq has the id m-2") as raised:
        run(*source, "--id", "m-1", "--id", "m-2")
    assert raised.value.returncode == 2


def test_replay_shows_refusals_and_exits_with_zero():
    DeadLetterFactory(of_job=True, replay_count=5)
    text = run("kjo_replay_dlq")
    assert "1 refused" in text
    assert "replayed too often" in text


def test_replay_exits_with_one_when_the_transport_refuses(memory):
    DeadLetterFactory()
    memory.fail("the broker is away")
    with pytest.raises(SystemExit) as exit:
        run("kjo_replay_dlq")
    assert exit.value.code == 1


def test_replay_reads_a_topic(memory):
    memory.publish([OutgoingRecord("email-queue-dlq", b"x", headers={names.ID: b"m-1"})])
    answer = run_json("kjo_replay_dlq", "--source", "topic", "--topic", "email-queue-dlq")
    assert answer["replayed"] == 1
    assert [record.value for record in memory.records("email-queue")] == [b"x"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--source", "topic"], "--topic NAME"),
        (["--topic", "x"], "--source topic"),
        (["--target", "x"], "--source topic"),
        (["--source", "topic", "--topic", "a", "--target", "a"], "source itself"),
        (["--source", "topic", "--topic", "gone"], "does not exist"),
        (["--id", "nonsense"], "not the id of a dead letter"),
        (["--since", "yesterday"], "is not a time"),
        (["--limit", "0"], "above 0"),
        *(
            (["--rate", rate], "argument --rate: .* is no number from 0.01 to 100,000 a second")
            for rate in ("fast", "0", "1e-300", "nan", "inf", "1e6")
        ),
    ],
)
def test_replay_says_what_is_wrong(arguments, words):
    with pytest.raises(CommandError, match=words):
        run("kjo_replay_dlq", *arguments)


def test_replay_prints_no_control_sequences_of_hostile_messages():
    DeadLetterFactory(of_job=True, replay_count=9, error_type="\x1b[2J\nroot:")
    text = run("kjo_replay_dlq")
    assert "\x1b" not in text
    assert not any(line.startswith("root:") for line in text.splitlines())


# --- kjo_topics ---------------------------------------------------------------------------------


def test_topics_are_planned_checked_and_created(memory):
    """KII-06: creation is idempotent."""
    # Given nothing is there: check fails, plan tells
    plan = run_json("kjo_topics", "plan", "--queue", "emails")
    assert {topic["name"]: topic["action"] for topic in plan["topics"]} == {
        "email-queue": "create",
        "email-queue-dlq": "create",
    }
    with pytest.raises(SystemExit) as exit:
        run("kjo_topics", "check", "--queue", "emails")
    assert exit.value.code == 1
    # When
    created = run("kjo_topics", "create", "--queue", "emails")
    # Then
    assert "created email-queue with 2 partitions" in created
    assert "as configured" in run("kjo_topics", "check", "--queue", "emails")
    assert run_json("kjo_topics", "create", "--queue", "emails")["changes"] == []


def test_topics_refuse_wrong_options(settings):
    settings.KJO = {"QUEUES": {"emails": {"topic_options": {"partition": 3}}}}
    with pytest.raises(CommandError, match="Did you mean 'partitions'"):
        run("kjo_topics", "plan")


# --- kjo_status ---------------------------------------------------------------------------------


def test_status_shows_queues_and_workers():
    # Given
    JobFactory.create_batch(3, queue="emails")
    QueueControlFactory(queue="images", is_paused=True)
    WorkerFactory(name="host-7", queues=["emails"])
    # When
    text = run("kjo_status")
    # Then
    line = next(line for line in text.splitlines() if line.startswith("emails"))
    heading = text.splitlines()[0].split()
    assert line.split()[heading.index("pending")] == "3"
    assert line.split()[heading.index("running")] == "0"
    assert "paused" in next(line for line in text.splitlines() if line.startswith("images"))
    assert "host-7" in text
    assert run_json("kjo_status", "emails")["queues"][0]["states"]["pending"] == 3


def test_status_says_how_to_start_a_worker():
    assert "kjo_consume" in run("kjo_status")


@pytest.mark.parametrize(
    "command", [["kjo_status", "emial"], ["kjo_topics", "create", "--queue", "emial"]], ids=str
)
def test_a_queue_that_nothing_names_is_wrong_usage(memory, command):
    """A misspelt one would get topics, or be told of as if it were empty."""
    with pytest.raises(CommandError, match="Did you mean 'email") as caught:
        run(*command)
    assert caught.value.returncode == 2


@pytest.mark.parametrize("command", ["kjo_limits", "kjo_workflows"])
def test_a_command_without_its_action_asks_for_the_action_only(command):
    with pytest.raises(CommandError, match=r"arguments are required: action$"):
        run(command)


# --- kjo_health ---------------------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
def test_health_exits_with_one_when_something_is_not_well():
    out = io.StringIO()
    with pytest.raises(SystemExit) as exit:
        call_command("kjo_health", "--json", stdout=out)
    assert exit.value.code == 1
    answer = json.loads(out.getvalue())
    assert answer["healthy"] is False
    assert next(c for c in answer["checks"] if c["name"] == "workers")["fix"]


@pytest.mark.django_db(transaction=True)
def test_health_is_silent_about_fixes_when_all_is_well():
    call_command("kjo_topics", "create", stdout=io.StringIO())
    WorkerFactory(queues=registry.queue_names())
    text = run("kjo_health", "--timeout", "30")
    assert "FAILED" not in text
    assert text.count("ok") >= 10


def test_health_names_wrong_settings_instead_of_crashing(settings):
    settings.KJO = {"QUEUESS": {}}
    out = io.StringIO()
    with pytest.raises(SystemExit):
        call_command("kjo_health", stdout=out)
    assert "QUEUESS" in out.getvalue()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--timeout", wrong) for wrong in ("1e300", "nan", "inf", "-1", "0", "soon")),
        *(("--max-failure-rate", wrong) for wrong in ("nan", "inf", "-0.1", "1.1", "all")),
        *(("--max-idle", wrong) for wrong in ("1e300", "nan", "inf", "-1", "9" * 20 + "w")),
    ],
)
def test_health_refuses_numbers_that_mean_nothing(option, value):
    with pytest.raises(CommandError, match=option):
        run("kjo_health", f"{option}={value}")


@pytest.mark.django_db(transaction=True)
def test_health_takes_the_longest_times():
    out = io.StringIO()
    with pytest.raises(SystemExit):
        call_command(
            *("kjo_health", "--json", "--timeout=3153600000", "--max-idle=200000w"), stdout=out
        )
    details = [check["detail"] for check in json.loads(out.getvalue())["checks"]]
    assert not [detail for detail in details if "OverflowError" in detail]


@pytest.mark.parametrize("value", ["1e300", "nan", "inf", "-1"])
@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("kjo_consume", "--status-interval"),
        ("kjo_produce", "--interval"),
        ("kjo_check_idempotency", "--timeout"),
    ],
)
def test_other_commands_refuse_seconds_that_nothing_waits_for(command, option, value):
    with pytest.raises(CommandError, match=option):
        run(command, f"{option}={value}")


# --- kjo_prune ----------------------------------------------------------------------------------


def test_prune_takes_overrides_and_a_dry_run():
    # Given a job that ended an hour ago
    moment = timezone.now() - timedelta(hours=1)
    job = JobFactory(completed=True, finished_at=moment)
    from kjo_django.ids import uuid7_floor

    Job.objects.filter(pk=job.pk).update(id=uuid7_floor(moment))
    # When, then
    assert run_json("kjo_prune")["deleted"]["jobs"] == 0
    assert run_json("kjo_prune", "--completed", "30m", "--dry-run")["deleted"]["jobs"] == 1
    assert "jobs: 1 deleted" in run("kjo_prune", "--completed", "30m")
    assert not Job.objects.exists()


def test_options_of_call_command_may_be_texts():
    """Django parses no keyword of ``call_command``."""
    call_command("kjo_prune", completed="1s", dry_run=True, stdout=io.StringIO())
    with pytest.raises(CommandError, match="not a duration") as raised:
        call_command("kjo_prune", completed="soon")
    assert raised.value.returncode == 2
    with pytest.raises(CommandError, match="limit"):
        call_command("kjo_replay_dlq", limit="none")


# --- Shared -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "lines"),
    [
        ("kjo_health", ["Seconds to answer in. (default: 5.0)", "(default: 100)", "(default: 5m)"]),
        ("kjo_consume", ["KJO['CONCURRENCY']", "(default: 1)", "KJO['STATUS_REPORT_INTERVAL']"]),
        ("kjo_produce", ["(default: 100)", "(default: new)"]),
        ("kjo_prune", ["KJO['RETENTION_COMPLETED']"]),
        ("kjo_replay_dlq", ["(default: table)", "(default: default)"]),
    ],
)
def test_help_tells_defaults_and_units(command, lines, capsys):
    with pytest.raises(SystemExit):
        call_command(command, "--help")
    text = " ".join(capsys.readouterr().out.split())
    assert [line for line in lines if line not in text] == []
    assert "How long due work may wait, such as 90s, 5m or 2h" in text or command != "kjo_health"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90", timedelta(seconds=90)),
        ("90s", timedelta(seconds=90)),
        ("1.5h", timedelta(minutes=90)),
        ("7d", timedelta(days=7)),
        ("2W", timedelta(weeks=2)),
    ],
)
def test_durations(text, expected):
    assert _shared.duration(text) == expected


@pytest.mark.parametrize("text", ["", "h", "-1h", "1y", "1h30m", "9" * 20 + "w"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(ArgumentTypeError):
        _shared.duration(text)


def test_instants_are_iso_or_a_time_ago():
    assert _shared.instant("2026-01-31T12:00:00+02:00").isoformat() == "2026-01-31T12:00:00+02:00"
    assert timezone.is_aware(_shared.instant("2026-01-31T12:00"))
    assert timezone.is_aware(_shared.instant("2026-01-31"))
    ago = timezone.now() - _shared.instant("2h")
    assert abs(ago - timedelta(hours=2)) < timedelta(seconds=5)


@pytest.mark.parametrize(
    "text", ["2026-13-01", "soon", "99999999w", "0001-01-01T00:00+02:00", "9999-12-31T23:59-02:00"]
)
def test_what_is_no_instant_is_refused(text):
    with pytest.raises(ArgumentTypeError, match="is not a time"):
        _shared.instant(text)


def test_a_setting_at_fault_is_an_error_without_a_traceback(settings):
    settings.KJO = {"CONCURRENCY": "four"}
    for command in (["kjo_status"], ["kjo_prune"], ["kjo_topics", "plan"], ["kjo_replay_dlq"]):
        with pytest.raises(CommandError, match="CONCURRENCY"):
            run(*command)


def test_json_holds_no_commands_for_a_terminal():
    """JSON escapes a few of them only; whoever wrote the message's headers wrote the rest."""
    DeadLetterFactory(of_job=True, handler="a\x9b2Jb\u202e", error_type="\x7f")
    printed = run("kjo_replay_dlq", "--dry-run", "--json")
    assert printed.strip().isprintable()
    assert json.loads(printed)["histogram"][0]["handler"] == "a\x9b2Jb\u202e"


# --- kjo_workflows --------------------------------------------------------------------------------


def test_workflows_are_listed_and_one_is_shown_with_its_stages():
    imported(id="monday", loads=4)
    imported(id="tuesday", name="export")
    listed = run_json("kjo_workflows", "list")["workflows"]
    assert [row["unique_id"] for row in listed] == ["tuesday", "monday"]
    assert [row["name"] for row in run_json("kjo_workflows", "list", "imp*")["workflows"]] == [
        "import"
    ]
    (row,) = run_json("kjo_workflows", "show", "monday")["workflows"]
    assert (row["steps"], row["open"]) == (6, 6)
    first, loads, last = row["stages"]
    assert loads["states"] == {"waiting": 4}
    assert (loads["requires"], last["requires"]) == ([first["id"]], [loads["id"]])
    text = run("kjo_workflows", "show", "monday")
    assert re.search(r"2 +ledger.load_part +ledger +4 +4 waiting +1", text)


def test_a_workflow_is_cancelled_retried_and_given_a_deadline():
    row = ended(id="monday", fails=True)
    assert run_json("kjo_workflows", "retry", "monday")["outcomes"] == {"retried": 1}
    run("kjo_workflows", "deadline", str(row.pk), "--in", "2h")
    row.refresh_from_db()
    assert row.state == "running"
    assert row.deadline > timezone.now() + timedelta(hours=1)
    run("kjo_workflows", "deadline", str(row.pk), "--never")
    assert run("kjo_workflows", "cancel", str(row.pk)) == "1 cancelled\n"
    row.refresh_from_db()
    assert (row.state, row.deadline) == ("cancelled", None)
    with pytest.raises(SystemExit):  # it is so already
        run("kjo_workflows", "cancel", str(row.pk))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["show"], "needs the id"),
        (["show", "nothing"], "no workflow 'nothing'"),
        (["cancel", "import"], "Several workflows"),
        (["deadline", "monday"], "--in DURATION, or --never"),
        (["retry", "monday", "--never"], "go with deadline"),
    ],
)
def test_workflows_that_are_not_found_and_options_that_do_not_fit_are_refused(arguments, problem):
    imported(id="monday")
    imported(id="tuesday")
    with pytest.raises(CommandError, match=problem):
        run("kjo_workflows", *arguments)
