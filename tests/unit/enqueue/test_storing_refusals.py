"""What is refused before anything is written."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime, timedelta

import pytest
from django.core.exceptions import ImproperlyConfigured

from kjo_django.exceptions import PayloadError
from kjo_django.models import Job
from tests.ledger.jobs import write, write_keyed
from tests.unit.enqueue.stored import writing_nothing

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("transport")]


@pytest.mark.parametrize(
    "ttl",
    [0, -1, 0.0001, math.nan, math.inf, True, False, "1000", [], 2**53 + 1,
     timedelta(0), timedelta(-1), timedelta(microseconds=999)],
    ids=repr,
)  # fmt: skip
def test_a_lifetime_of_a_result_that_means_nothing_is_refused(ttl):
    """PJQ-40."""
    with writing_nothing(), pytest.raises(ValueError, match="result_ttl must be a"):
        write.using(result_ttl=ttl).enqueue(job="a")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"run_at": datetime(2030, 1, 1)}, "run_at must be an aware datetime"),
        ({"expires_at": datetime(2030, 1, 1)}, "expires_at must be an aware datetime"),
        ({"run_at": "tomorrow"}, "run_at must be"),
        ({"run_at": datetime.max.replace(tzinfo=UTC)}, "run_at must be between the years"),
        ({"run_at": datetime.min.replace(tzinfo=UTC)}, "run_at must be between the years"),
        ({"expires_at": datetime.max.replace(tzinfo=UTC)}, "expires_at must be between"),
        ({"delay": "5"}, "delay must be a timedelta"),
        ({"delay": timedelta.max}, "delay"),
        ({"delay": timedelta(1), "run_at": datetime(2030, 1, 1, tzinfo=UTC)}, "not both"),
        ({"id": ""}, "id must be text"),
        ({"id": 7}, "id must be text"),
        ({"id": "x" * 256}, "id must be text"),
        ({"key": "x" * 256}, "key must"),
        ({"key": 7}, "key must"),
        ({"max_attempts": 0}, "max_attempts must"),
        ({"max_attempts": "3"}, "max_attempts must"),
        ({"max_attempts": 2**31}, "max_attempts must"),
        ({"max_attempts": True}, "max_attempts must"),
        ({"headers": {"trace": 1}}, "headers must"),
        ({"headers": {1: "a"}}, "headers must"),
        ({"headers": {"a": "\ud800"}}, "headers must"),
        ({"headers": "a"}, "headers must"),
        ({"colour": 1}, "no option 'colour'"),
        ({"queue": "legder"}, "No queue is named 'legder'.*Did you mean 'ledger'"),
        ({"queue": "xyz"}, "No queue is named 'xyz'.*Known: "),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_an_option_that_means_nothing_is_refused(options, says):
    with writing_nothing(), pytest.raises((TypeError, ValueError), match=says):
        write.using(**options).enqueue(job="a")


@pytest.mark.parametrize(
    "payload",
    [{}, {"jobb": "a"}, {"job": "a", "extra": 1}, {"note": "x"}],
    ids=lambda payload: ",".join(payload) or "none",
)
def test_arguments_that_do_not_fit_the_signature_are_refused(payload):
    with writing_nothing(), pytest.raises(TypeError, match=r"ledger\.write: "):
        write.enqueue(**payload)


@pytest.mark.parametrize(
    "value",
    [math.nan, object(), b"x", "\ud800", {1, 2}],
    ids=["nan", "object", "bytes", "surrogate", "set"],
)
def test_a_payload_that_is_no_json_is_refused(value):
    with writing_nothing(), pytest.raises(PayloadError):
        write.enqueue(job=value)


def test_a_payload_over_the_limit_is_refused_and_one_at_the_limit_is_not(settings):
    """RST-F12: pass ids, not contents."""
    settings.KJO = {**settings.KJO, "MAX_PAYLOAD_BYTES": len(json.dumps({"job": "é"}).encode()) - 5}
    with writing_nothing(), pytest.raises(PayloadError, match="13 bytes"):
        write.enqueue(job="éx")
    assert write.enqueue(job="é").is_new


@pytest.mark.parametrize("text", ["a\0b", "\ud800"], ids=["nul", "surrogate"])
def test_an_id_or_a_key_no_database_keeps_is_refused_before_anything_is_written(text):
    for options in ({"id": text}, {"key": text}):
        with pytest.raises(ValueError, match="holds a character no database keeps"):
            write.using(**options)
    with pytest.raises(ValueError, match=r"ledger\.write_keyed: the key holds a character"):
        write_keyed.enqueue(job="job", key=text)
    assert not Job.objects.exists()


def test_a_key_of_the_payload_that_is_too_long_is_refused():
    with writing_nothing(), pytest.raises(ValueError, match="256 characters"):
        write_keyed.enqueue(job="a", key="k" * 256)


def test_a_transport_that_is_not_declared_is_refused(settings):
    settings.KJO = {"QUEUES": {"ledger": {"transport": "kafak"}}}
    with writing_nothing(), pytest.raises(ImproperlyConfigured, match="'kafak'"):
        write.enqueue(job="a")
