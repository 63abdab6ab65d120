"""``task``, ``KJOTask`` and the backends that only tolerate its options."""

from __future__ import annotations

import pickle
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip(
    "kjo_django.contrib.tasks.compat",
    reason="neither Django's tasks nor the backport django-tasks is installed",
    exc_type=ImportError,
)

from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured

from kjo_django.contrib.tasks import KJOTask, compat, task
from tests.contrib import conftest

HOUR = timedelta(hours=1)


def test_the_decorator_takes_the_options_everywhere(tasks: Any) -> None:
    assert isinstance(tasks.hang, KJOTask)
    assert (tasks.hang.max_attempts, tasks.hang.timeout) == (1, 0.05)
    assert tasks.add.call(1) == 2
    with pytest.raises(TypeError, match="run_after"):
        task(run_after=None)
    with pytest.raises(TypeError):
        task(colour="red")(tasks.was_a_task)


def test_using_takes_them_too_and_nothing_else(tasks: Any) -> None:
    changed = tasks.add.using(unique_id="a", result_ttl=timedelta(hours=1))
    assert (changed.unique_id, changed.max_attempts) == ("a", None)
    assert tasks.add.unique_id is None
    assert tasks.add.using() == tasks.add
    with pytest.raises(TypeError, match="It takes: atomic, backend"):
        tasks.add.using(colour="red")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_attempts", 0),
        ("max_attempts", True),
        ("timeout", -1),
        ("unique_id", ""),
        ("unique_id", "x" * 256),
        ("key", 7),
        ("expires", timedelta(0)),
        ("result_ttl", 0),
        ("atomic", 1),
        ("unique_for", -1),
        ("unique_by", 7),
        ("debounce", timedelta(0)),
        ("debounce_max", "a minute"),
        ("on_conflict", "never"),
    ],
)
def test_values_that_mean_nothing_are_refused(tasks: Any, name: str, value: Any) -> None:
    with pytest.raises(compat.InvalidTask, match=name):
        tasks.add.using(**{name: value})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"unique_for": HOUR, "debounce": HOUR}, "unique_for or debounce, not both"),
        ({"unique_for": HOUR, "unique_id": "a"}, "Give id, or unique_for"),
        ({"unique_by": ["a"]}, "unique_by needs unique_for or debounce"),
        ({"unique_for": HOUR, "unique_by": ["c"]}, "unique_by='c' is not an argument"),
        ({"debounce": HOUR, "on_conflict": "raise"}, "debounce replaces the job that waits"),
        ({"debounce": HOUR, "debounce_max": HOUR / 2}, "must not be shorter than debounce"),
    ],
)
def test_options_of_windows_that_contradict_each_other_are_refused(
    tasks: Any, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(compat.InvalidTask, match=says):
        tasks.add.using(**options)
    with pytest.raises(compat.InvalidTask, match=says):
        task(**options)(tasks.add.func)


def test_where_the_framework_pickles_so_do_ours(tasks: Any) -> None:
    if not hasattr(compat.Task, "_reconstruct"):
        pytest.skip("tasks of this framework cannot be pickled")
    changed = tasks.add.using(max_attempts=4)
    assert pickle.loads(pickle.dumps(changed)) == changed


def test_immediate_and_dummy_backends_tolerate_the_options(tasks: Any) -> None:
    here = tasks.add.using(backend="immediate", max_attempts=2).enqueue(1)
    assert (here.status, here.return_value) == ("SUCCESSFUL", 2)
    kept = tasks.add.using(backend="dummy", unique_id="a").enqueue(1)
    assert compat.task_backends["dummy"].results == [kept]
    assert task(backend="immediate", timeout=3)(tasks.was_a_task).timeout == 3


@pytest.mark.parametrize(
    ("parameters", "id", "text"),
    [
        ({"OPTIONS": {"max_attemps": 3}}, "kjo.E009", "no key 'max_attemps'"),
        ({"OPTIONS": {"atomic": "yes"}}, "kjo.E009", "True or False"),
        ({"OPTIONS": {"timeout": -3}}, "kjo.E009", "positive"),
        ({"QUEUES": ["x" * 101]}, "kjo.E010", "1 to 100 characters"),
        ({"QUEUES": [7]}, "kjo.E010", "1 to 100 characters"),
    ],
)
def test_checks(tasks: Any, settings: Any, parameters: Any, id: str, text: str) -> None:
    settings.TASKS = {"default": {"BACKEND": conftest.BACKEND, **parameters}}
    [message] = list(compat.task_backends["default"].check())
    assert message.id == id
    assert text in message.msg


def test_a_backend_without_its_app_is_found(tasks: Any, settings: Any) -> None:
    backend = compat.task_backends["other"]
    settings.INSTALLED_APPS = []
    # When
    [message] = backend.check()
    # Then
    assert (message.id, message.is_serious()) == ("kjo.E023", True)
    assert "TASKS['other']['BACKEND'] is KJOBackend" in message.msg
    assert "INSTALLED_APPS = [..., 'kjo_django']" in message.hint
    # And whoever uses it, where nobody has run the checks, reads the same
    for use in (lambda: tasks.add.enqueue(1), lambda: backend.get_result("1")):
        with pytest.raises(ImproperlyConfigured, match=r"TASKS.*INSTALLED_APPS = "):
            use()


def test_a_second_framework_beside_the_one_that_is_served_is_found(
    tasks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found() -> list[Any]:
        return [each for each in run_checks(tags=["kjo"]) if each.id == "kjo.W021"]

    # Given only one
    monkeypatch.setitem(sys.modules, "django_tasks.base", SimpleNamespace(Task=compat.Task))
    assert found() == []
    # When
    monkeypatch.setitem(sys.modules, "django_tasks.base", SimpleNamespace(Task=object))
    # Then
    [warning] = found()
    assert "Both django.tasks and django_tasks are in use" in warning.msg
    assert "from django.tasks" in warning.hint
    # And without the backport
    monkeypatch.delitem(sys.modules, "django_tasks.base")
    assert found() == []


def test_a_queue_that_carries_no_jobs_is_found(tasks: Any) -> None:
    from kjo_django import registry

    registry.bind("mails", registry.Route())
    messages = list(compat.task_backends["default"].check())
    assert [message.id for message in messages] == ["kjo.E010"]


def test_right_settings_have_no_findings(tasks: Any) -> None:
    assert [m for backend in compat.task_backends.all() for m in backend.check()] == []


@pytest.mark.django_db
def test_wrong_options_stop_an_enqueue(tasks: Any, settings: Any) -> None:
    options = {"OPTIONS": {"max_attempts": "many"}}
    settings.TASKS = {"default": {"BACKEND": conftest.BACKEND, **options}}
    with pytest.raises(ImproperlyConfigured, match="max_attempts"):
        tasks.add.enqueue(1)
