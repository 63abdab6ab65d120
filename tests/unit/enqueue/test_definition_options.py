"""Options are checked where they are written, in the words of the function that was called."""

from __future__ import annotations

import dataclasses
import re
import typing
from datetime import timedelta

import pytest
from django.core.exceptions import ImproperlyConfigured

from kjo_django import DlqConfig, Queue, Retry, conf, event_handler, exponential, job, registry
from kjo_django.contrib.tasks import task
from kjo_django.enqueue import definition
from kjo_django.models import Job
from kjo_django.patterns.kdlq import kdlq_handler
from tests.ledger.jobs import write
from tests.unit.enqueue.stored import writing_nothing

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("transport")]


@pytest.fixture
def queue(forgotten_definitions):
    return Queue("optional")


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"retries": 3}, "job() has no option 'retries'. Did you mean 'max_attempts'?"),
        ({"max_retries": 3}, "job() has no option 'max_retries'. Did you mean 'max_attempts'?"),
        ({"tiemout": 3}, "job() has no option 'tiemout'. Did you mean 'timeout'?"),
        ({"time_limit": 3}, "job() has no option 'time_limit'. Did you mean 'timeout'?"),
        ({"autoretry_for": OSError}, "job() has no option 'autoretry_for'. Did you mean 'retry_on"),
        ({"retry_backoff": 3}, "job() has no option 'retry_backoff'. Did you mean 'backoff'?"),
        ({"colour": 3}, "job() has no option 'colour'. It takes: atomic, backoff, batch, "),
        ({"result_serializer": None}, "job() has no option 'result_serializer'. "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_the_decorator_takes_what_it_documents_and_nothing_else(option, says):
    with pytest.raises(TypeError, match=re.escape(says)):
        job(**option)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"atomic": "no"}, "job(atomic='no'): atomic must be True or False"),
        ({"takes_context": 1}, "job(takes_context=1): takes_context must be True or False"),
        ({"key": 5}, "job(key=5): key must be the name of an argument, or a function"),
        ({"serializer": "json"}, "job(serializer='json'): serializer must be an object with "),
        ({"backoff": -1}, "job(backoff=-1): backoff must be a timedelta or a number of seconds, "),
        ({"backoff": "30"}, "job(backoff='30'): backoff must be a timedelta or a number of "),
        ({"backoff": float("nan")}, "job(backoff=nan): backoff must be a timedelta or a number "),
        ({"backoff": True}, "job(backoff=True): backoff must be a timedelta or a number of "),
        ({"backoff": [10, 1]}, "job(backoff=[10, 1]): backoff must be an ascending list of "),
        ({"backoff": []}, "job(backoff=[]): backoff must be an ascending list of delays, with at "),
        ({"backoff": [1, -1]}, "job(backoff=[1, -1]): backoff must be a timedelta or a number "),
        ({"backoff": lambda: 1}, "backoff must be a function that takes the attempt and its error"),
        ({"retry_on": "OSError"}, "job(retry_on='OSError'): retry_on must be an exception class "),
        ({"retry_on": []}, "job(retry_on=[]): retry_on must be an exception class or a list of "),
        ({"give_up_on": (int,)}, "job(give_up_on=(<class 'int'>,)): give_up_on must be an "),
        (
            {"retry_on": ConnectionError, "give_up_on": OSError},
            "job(retry_on=…): ConnectionError is among those of give_up_on",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_the_decorators_values_are_checked(option, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        job(**option)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"base": 0}, "base must be above 0 and at most max, not 0"),
        ({"base": -1}, "base must be a timedelta or a number of seconds, from 0 to 3,650 days"),
        ({"base": 5, "max": 4}, "base must be above 0 and at most max, not 5"),
        ({"base": 5, "max": "1 h"}, "max must be a timedelta or a number of seconds, "),
        ({"base": 5, "jitter": 2}, "jitter must be a number from 0 to 1, not 2"),
    ],
)
def test_an_exponential_back_off_that_means_nothing_is_refused(options, says):
    with pytest.raises(ValueError, match=re.escape(f"exponential(): {says}")):
        exponential(**options)


def test_a_key_that_the_function_does_not_take_is_refused_at_the_declaration():
    """Or its jobs would have no order, and nobody would notice."""

    def refund(order, country): ...

    def with_context(context, order): ...

    def anything(**payload): ...

    def batch(items): ...

    says = r"refund: key='ordre' is not an argument of the function\. Did you mean 'order'\?"
    with pytest.raises(ImproperlyConfigured, match=says):
        job(name="refund", key="ordre")(refund)
    with pytest.raises(ImproperlyConfigured, match=r"key='nope'.*It takes: country, order\."):
        job(name="refund", key="nope")(refund)
    with pytest.raises(ImproperlyConfigured, match="key='context'"):
        job(name="refund", key="context", takes_context=True)(with_context)
    # And what cannot be known is not refused
    for function, options in ((refund, {}), (anything, {}), (batch, {"batch": 10})):
        job(name="tests.kept", key="order", **options)(function)
        registry.unregister("tests.kept")


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"retries": 3}, "using() has no option 'retries'. Did you mean 'max_attempts'?"),
        ({"countdown": 3}, "using() has no option 'countdown'. Did you mean 'delay'?"),
        ({"eta": 3}, "using() has no option 'eta'. Did you mean 'run_at'?"),
        ({"unique_id": "a"}, "using() has no option 'unique_id'. Did you mean 'id'?"),
        (
            {"colour": 3},
            "using() has no option 'colour'. It takes: debounce, debounce_max, delay, expires_at, "
            "headers, id, key, max_attempts, on_conflict, priority, queue, result_ttl, run_at, "
            "unique_by, unique_for.",
        ),
        (
            {"delay": "60"},
            "delay must be a timedelta or number of seconds, of at most 3650 days, not '60'",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_using_names_itself_and_what_was_meant(option, says):
    with pytest.raises((TypeError, ValueError), match=re.escape(says)):
        write.using(**option)


@pytest.mark.parametrize("seconds", [90, 90.0], ids=["whole", "float"])
def test_delays_are_timedeltas_or_seconds_wherever_they_are_given(queue, seconds):
    delay = timedelta(seconds=seconds)
    for option in ("delay", "unique_for", "debounce"):
        assert write.using(**{option: seconds}).options == write.using(**{option: delay}).options
    longest = {"debounce": 1, "debounce_max": seconds}
    assert write.using(**longest).options.debounce_max == delay
    declared = job(name="tests.seconds", timeout=seconds, unique_for=seconds, result_ttl=seconds)(
        lambda: None
    )
    registry.unregister("tests.seconds")
    kept = declared.handler.options
    assert kept.timeout == kept.unique_for == kept.result_ttl == delay
    assert Retry(delay=seconds).delay == delay
    assert write.using(result_ttl=seconds).options.result_ttl == delay
    config = DlqConfig("dead", redelivery_delay=seconds, max_redelivery_delay=seconds)
    assert config.redelivery_delay == config.max_redelivery_delay == delay
    queue.enqueue("j1", 1, delay=seconds)
    stored = Job.objects.get(unique_id="j1")
    assert stored.available_at - stored.created_at == delay


@pytest.mark.parametrize(
    "refuse",
    [
        lambda value: write.using(delay=value),
        lambda value: write.using(unique_for=value),
        lambda value: Retry(delay=value),
        lambda value: DlqConfig("dead", redelivery_delay=value),
    ],
    ids=["delay", "unique_for", "Retry", "redelivery_delay"],
)
@pytest.mark.parametrize("value", ["60", float("nan"), float("inf"), True], ids=repr)
def test_no_other_delay_is_taken(refuse, value):
    with pytest.raises((TypeError, ValueError), match=r"timedelta or (a )?number of seconds"):
        refuse(value)


def test_the_options_that_type_checkers_know_are_those_there_are():
    known = typing.get_type_hints(definition.JobOptions).keys()
    assert known | {"takes_context", "batch"} == {"name", *definition._CHECKS}
    usable = typing.get_type_hints(definition.UsingOptions)
    kept = {field.name for field in dataclasses.fields(definition.EnqueueOptions)}
    assert usable.keys() == kept


@pytest.mark.parametrize("method", ["enqueue", "enqueue_and_wait"])
@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"max_retries": 3}, "has no option 'max_retries'. Did you mean 'max_attempts'?"),
        ({"reply_to": "x"}, "has no option 'reply_to'. "),
        ({"timeuot": 5}, "has no option 'timeuot'. "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_queues_enqueue_names_itself(queue, method, option, says):
    with writing_nothing(), pytest.raises(TypeError, match=re.escape(f"Queue.{method}() {says}")):
        getattr(queue, method)("j1", 1, **option)


def test_a_timeout_belongs_to_the_handler_and_not_to_the_enqueue(queue):
    with writing_nothing(), pytest.raises(TypeError, match=r"Queue\.enqueue\(\) has no option 'ti"):
        queue.enqueue("j1", 1, timeout=5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"retries": 3}, "Queue() has no option 'retries'. Did you mean 'max_attempts'?"),
        ({"concurrency": 0}, "Queue('q'): concurrency must be a whole number, at least 1, not 0"),
        ({"max_retries": 0}, "Queue('q'): max_retries must be a whole number from 1 to "),
        ({"max_attempts": "2"}, "Queue('q'): max_attempts must be a whole number from 1 to "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_queue_names_itself_and_the_option(options, says):
    with pytest.raises((TypeError, ValueError), match=re.escape(says)):
        Queue("q", **options)
    assert "q" not in conf.declared_queues()


@pytest.mark.parametrize("declare", ["execute", "handler"])
def test_a_queues_handler_names_itself(queue, declare):
    says = re.escape(f"Queue.{declare}() has no option 'time_limit'. Did you mean 'timeout'?")
    with pytest.raises(TypeError, match=says):
        if declare == "execute":
            queue.execute(print, time_limit=5)
        else:
            queue.handler(time_limit=5)


@pytest.mark.parametrize(
    ("declare", "error", "says"),
    [
        (
            lambda: event_handler("T", topic="optional-events", retries=3),
            TypeError,
            "event_handler() has no option 'retries'. Did you mean 'max_attempts'?",
        ),
        (
            lambda: event_handler("T", topic="optional-events", concurrency=0),
            ValueError,
            "event_handler()['concurrency'] must be a whole number, at least 1, not 0.",
        ),
        (
            lambda: kdlq_handler("c", topic="optional-events", max_attempt=3),
            TypeError,
            "kdlq_handler() has no option 'max_attempt'. Did you mean 'max_attempts'?",
        ),
        (
            lambda: task(retries=3),
            TypeError,
            "task() has no option 'retries'. Did you mean 'max_attempts'?",
        ),
    ],
    ids=["event", "event value", "kdlq", "task"],
)
def test_other_decorators_name_themselves_at_once(declare, error, says):
    """Or ``manage.py check`` ends in a traceback that blames a setting nobody has written."""
    with pytest.raises(error, match=re.escape(says)):
        declare()
    assert "optional-events" not in conf.declared_queues()


def test_arguments_of_a_job_are_given_by_keyword():
    says = r"ledger\.write\.enqueue\(\) takes the arguments by keyword: enqueue\(job=…, note=…\)"
    with writing_nothing(), pytest.raises(TypeError, match=says):
        write.enqueue(7, "DE")  # type: ignore[arg-type]


def test_a_job_may_have_an_argument_named_self():
    @job(name="tests.selfish")
    def selfish(self): ...

    try:
        selfish.enqueue(self=1)
    finally:
        registry.unregister("tests.selfish")
    assert Job.objects.get().arguments == {"self": 1}


@pytest.mark.parametrize("id", ["   ", "\t", "\n"])
def test_an_id_of_blanks_is_none(queue, id):
    says = "id must be text of 1 to 255 characters that are not all blank"
    with writing_nothing():
        for attempt in (
            lambda: queue.enqueue(id, 1),
            lambda: write.using(id=id),
            lambda: write.enqueue_many([{"job": "a"}], ids=[id]),
        ):
            with pytest.raises(ValueError, match=says):
                attempt()


@pytest.mark.parametrize("ttl", ["1h", 1.5, 0, -1, timedelta(0), True, 2**60])
def test_a_lifetime_says_at_once_all_that_is_wanted(queue, ttl):
    says = (
        "result_ttl must be a positive timedelta or a positive whole number of milliseconds, at "
        "most 100 years, not "
    )
    with writing_nothing(), pytest.raises((TypeError, ValueError), match=says):
        queue.enqueue("a", 1, result_ttl=ttl)
