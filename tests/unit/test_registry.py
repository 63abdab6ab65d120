"""Declaring jobs: names, options, and what is refused at the declaration."""

from __future__ import annotations

import functools
import math
import sys
from datetime import timedelta

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from kjo_django import Queue, event_handler, job, registry
from kjo_django.conf import get_settings
from kjo_django.messages import serializers
from kjo_django.messages.serializers import serializer_for
from kjo_django.values import signature_of
from tests.ledger import jobs as ledger


@pytest.fixture(autouse=True)
def _own_registry(forgotten_definitions, monkeypatch):
    """What a test declares is forgotten afterwards."""
    monkeypatch.setattr(serializers, "_serializers", dict(serializers._serializers))


@pytest.mark.skipif(sys.version_info < (3, 14), reason="annotations are evaluated at once")
def test_an_annotation_may_name_what_only_a_type_checker_imports():
    """Since Python 3.14 without ``from __future__ import annotations``, which this module has."""
    declared, source = {}, "def ship(order: Order, by: Carrier = None): ..."
    exec(compile(source, "jobs.py", "exec", dont_inherit=True), declared)
    handler = job(name="shop.ship")(declared["ship"]).handler
    assert handler.required_arguments({}) == ["order"]
    assert handler.check_arguments({"order": 7, "by": "post"}) is None
    assert handler.check_arguments({"order": 7, "to": "Ada"}) is not None
    assert [*signature_of(declared["ship"]).parameters] == ["order", "by"]


def test_jobs_of_installed_apps_are_found_and_named_after_their_app():
    handler = registry.find("ledger.write")
    assert handler is not None
    assert handler is ledger.write.handler
    assert handler.options.queue == "ledger"


def test_a_function_outside_every_app_is_named_after_its_module():
    @job
    def wander(): ...

    assert wander.name == f"{__name__}.wander"


def test_a_job_is_declared_with_and_without_options():
    @job
    def bare(): ...

    @job()
    def called(): ...

    @job(name="shop.named", queue="emails", max_attempts=2, timeout=1.5)
    def named(): ...

    assert (bare.handler.options.queue, called.handler.options.queue) == ("default", "default")
    assert registry.find("shop.named") is named.handler
    assert named.handler.options.timeout == timedelta(seconds=1.5)


def test_calling_a_job_runs_its_function_here_and_now():
    @job
    def add(a, b=1):
        """Add."""
        return a + b

    assert add(1, b=2) == 3
    assert (add.__name__, add.__doc__) == ("add", "Add.")


def test_coroutine_functions_are_told_from_others():
    assert ledger.write_async.handler.is_async
    assert not ledger.write.handler.is_async


class Callable:
    """Does the work of a job."""

    def __call__(self, name: str) -> str:
        return name


class Awaited:
    async def __call__(self, name: str) -> str:
        return name


def add(a: int, b: int) -> int:
    return a + b


async def add_async(a: int, b: int) -> int:
    return a + b


@pytest.mark.parametrize(
    ("function", "payload", "is_async"),
    [
        (functools.partial(add, b=1), {"a": 1}, False),
        (functools.partial(add_async, b=1), {"a": 1}, True),
        (Callable(), {"name": "x"}, False),
        (Awaited(), {"name": "x"}, True),
        (Callable().__call__, {"name": "x"}, False),
    ],
    ids=["partial", "async partial", "object", "async object", "method"],
)
def test_whatever_can_be_called_is_a_job_once_it_has_a_name(function, payload, is_async):
    definition = job(name="shop.any")(function)
    assert definition.handler.is_async is is_async
    assert definition.handler.check_arguments(payload) is None
    job(name="shop.any")(function)  # a module imported twice


@pytest.mark.parametrize(
    "function", [functools.partial(add, b=1), Callable()], ids=["partial", "object"]
)
def test_what_has_no_name_of_its_own_is_asked_for_one(function):
    """An AttributeError did not say what to do."""
    with pytest.raises(ImproperlyConfigured, match="Give it one: name='…'"):
        job(function)


@pytest.mark.parametrize("options", [{}, {"takes_context": True}], ids=str)
def test_an_argument_that_no_payload_can_give_is_refused(options):
    with pytest.raises(ImproperlyConfigured, match="can only be given by place"):
        job(name="shop.any", **options)(lambda a, b, /, c: None)


def test_the_context_may_be_given_by_place():
    handler = job(name="shop.any", takes_context=True)(lambda context, /, a: None).handler
    assert handler.check_arguments({"a": 1}) is None


def test_two_functions_of_one_name_are_refused_naming_both():
    def declare(scope):
        @job(name="shop.twice")
        def function(): ...

        function.handler.function.__qualname__ = f"{scope}.function"
        return function

    @job(name="shop.twice")
    def first(): ...

    with pytest.raises(ImproperlyConfigured, match=r"'shop\.twice'.*first.*second"):

        @job(name="shop.twice")
        def second(): ...

    assert registry.find("shop.twice") is first.handler


def test_a_module_imported_twice_declares_its_jobs_twice_without_harm():
    def declare():
        @job(name="shop.again")
        def again(): ...

        return again

    declare()
    latest = declare()
    assert registry.find("shop.again") is latest.handler


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("x" * 101, "1 to 100 characters"),
        ("a\0b", "no database keeps"),
        ("two\nlines", "no page can show"),
    ],
)
def test_a_name_that_fits_no_column_is_refused(name, says):
    with pytest.raises(ImproperlyConfigured, match=says):
        job(name=name)(lambda: None)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_attempts": 0}, "max_attempts"),
        ({"max_attempts": -1}, "max_attempts"),
        ({"max_attempts": "3"}, "max_attempts"),
        ({"max_attempts": True}, "max_attempts"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": "5"}, "timeout"),
        ({"timeout": math.inf}, "timeout"),
        ({"result_ttl": timedelta(0)}, "result_ttl"),
        ({"result_ttl": timedelta(microseconds=1)}, "result_ttl"),
        ({"result_ttl": "1h"}, "result_ttl"),
        ({"result_ttl": timedelta.max}, "result_ttl"),
        ({"queue": ""}, "queue"),
        ({"queue": "q" * 101}, "queue"),
        ({"queue": 5}, "queue"),
        ({"max_retries": 3}, "max_retries"),
    ],
)
def test_an_option_that_could_never_work_is_refused_at_the_declaration(options, says):
    with pytest.raises((TypeError, ValueError), match=says):
        job(**options)(lambda: None)


def test_arguments_are_checked_against_the_signature():
    def function(context, a, *, b=1): ...

    plain = registry.Handler(function, registry.HandlerOptions("x"))
    with_context = registry.Handler(function, registry.HandlerOptions("x", takes_context=True))
    assert plain.check_arguments({"context": 1, "a": 1}) is None
    assert with_context.check_arguments({"a": 1, "b": 2}) is None
    assert "missing a required argument: 'a'" in with_context.check_arguments({})
    assert "unexpected keyword argument 'c'" in with_context.check_arguments({"a": 1, "c": 1})


def test_the_key_is_a_field_or_a_function_of_the_payload():
    def function(**payload): ...

    def key_of(declared, payload):
        return registry.Handler(function, registry.HandlerOptions("x", key=declared)).key_of(
            payload
        )

    assert key_of(None, {"a": 1}) == ""
    assert key_of("a", {"a": 1}) == "1"
    assert key_of("a", {"a": None}) == ""
    assert key_of("a", {}) == ""
    assert key_of(lambda a, **rest: f"<{a}>", {"a": 1, "b": 2}) == "<1>"


@override_settings(KJO={"QUEUES": {"declared": {}}})
def test_queues_are_those_declared_and_those_used():
    @job(queue="used")
    def function(): ...

    assert {"declared", "used", "ledger"} <= set(registry.queue_names())
    assert registry.queue_names() == sorted(registry.queue_names())


def test_a_jobs_own_serializer_is_known_to_whoever_receives_its_messages():
    class Upper(serializers.JsonSerializer):
        content_type = "application/upper"

    own = Upper()

    @job(serializer=own)
    def function(): ...

    assert serializer_for("application/upper") is own


def test_using_returns_a_copy_and_refuses_unknown_options():
    later = ledger.write.using(delay=timedelta(minutes=5))
    assert later.name == ledger.write.name
    assert later is not ledger.write
    assert ledger.write.options.delay is None
    with pytest.raises(TypeError, match=r"no option 'dealy'"):
        ledger.write.using(dealy=1)


# --- Declared for a test --------------------------------------------------------------------------


def test_what_is_declared_in_isolation_is_forgotten():
    before = registry.handlers()
    # When
    with registry.isolated():
        job(name="tests.limited", queue="tests.queue", rate="5/s")(lambda: None)
        own = registry.Handler(print, registry.HandlerOptions(name="tests.own"))
        registry.register(own, is_own=True)
        registry.bind("tests.queue", route := registry.Route())
        # Then it can be used
        assert registry.find("tests.limited") in registry.handlers()
        assert "tests.limited" in registry.limited
        assert registry.find("tests.own") is own
        assert registry.route_of("tests.queue") is route
    # And is gone
    assert registry.handlers() == before
    assert "tests.limited" not in registry.limited
    assert registry.find("tests.own") is None
    assert registry.route_of("tests.queue") is registry.JOBS


def test_a_queue_that_is_declared_in_isolation_has_no_options_after_it():
    with registry.isolated():
        Queue("tests.queue", concurrency=7)
        assert get_settings().queue("tests.queue").concurrency == 7
        assert "tests.queue" in registry.queue_names()
    assert get_settings().queue("tests.queue").concurrency != 7
    assert "tests.queue" not in registry.queue_names()


def test_what_was_declared_before_is_there_in_isolation_and_again_after_it():
    with pytest.raises(ZeroDivisionError), registry.isolated():
        # Given
        assert registry.find("ledger.write") is ledger.write.handler
        # When a test takes it away, replaces it, and fails
        registry.unregister("ledger.write")
        job(name="ledger.write")(lambda job: None)
        raise ZeroDivisionError
    # Then
    assert registry.find("ledger.write") is ledger.write.handler


def test_isolation_within_isolation_forgets_its_own_only():
    with registry.isolated():
        job(name="tests.outer")(lambda: None)
        with registry.isolated():
            job(name="tests.inner")(lambda: None)
        assert registry.find("tests.outer") is not None
        assert registry.find("tests.inner") is None
    assert registry.find("tests.outer") is None


def test_a_function_is_isolated_each_time_it_is_called():
    @registry.isolated()
    def declare():
        assert registry.find("tests.again") is None
        job(name="tests.again")(lambda: None)

    declare()
    declare()
    assert registry.find("tests.again") is None


def test_handlers_of_events_are_forgotten_with_their_topics_and_without():
    with registry.isolated():
        # Given a topic with a handler
        event_handler("order.placed", topic="tests.orders")(lambda event: None)
        route = registry.route_of("tests.orders")
        with registry.isolated():
            # When it gets another one, and another topic its first
            event_handler("order.paid", topic="tests.orders")(lambda event: None)
            event_handler("mail.sent", topic="tests.mails")(lambda event: None)
            assert [*route.handlers] == ["order.placed", "order.paid"]
        # Then
        assert [*route.handlers] == ["order.placed"]
        assert registry.route_of("tests.orders") is route
        assert registry.route_of("tests.mails") is registry.JOBS
        # And both can be declared again
        event_handler("mail.sent", topic="tests.mails")(lambda event: None)
        assert [*registry.route_of("tests.mails").handlers] == ["mail.sent"]
        assert registry.route_of("tests.mails-retry") is registry.route_of("tests.mails")
