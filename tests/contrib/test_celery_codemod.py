"""The codemod, rewrite by rewrite: what Celery's code becomes, and what is left, and why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

pytest.importorskip("libcst", reason="the extra migrate is not installed")

from kjo_django import Retry, job, registry
from kjo_django.contrib.celery_codemod.migration import Migration
from kjo_django.contrib.celery_codemod.migration_report import Report
from kjo_django.models import Job
from kjo_django.testing import drain

pytestmark = pytest.mark.small

TASKS = """
from celery import shared_task
from shop.errors import Gone


@shared_task
def send(order_id, copy=False):
    ...


@shared_task
def add(total, amount):
    return total + amount


@shared_task
def publish(album):
    ...


@shared_task(bind=True)
def export(self, report_id):
    return self.request.id


@shared_task
def several(*ids):
    ...
"""

Rewrite = Callable[..., str]


class Project:
    """The files of a project in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.report = Report()

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip())
        return path

    def migrate(self, *, write: bool = True) -> Report:
        packages = self.folder / "site-packages"
        migration = Migration([self.folder], packages=[packages] if packages.exists() else [])
        migration.rewrite()
        if write:
            migration.write()
        self.report = migration.report
        return self.report

    @property
    def reasons(self) -> list[str]:
        return [f"{each.what}: {each.why}" for each in self.report.findings]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    found = Project(tmp_path)
    found.write("shop/__init__.py", "")
    found.write("shop/models.py", "")
    found.write("shop/tasks.py", TASKS)
    return found


@pytest.fixture
def declared(project: Project) -> Rewrite:
    """What a declaration becomes: its decorator and function, without imports."""

    def rewrite(code: str) -> str:
        head = "from celery import shared_task\n\n"
        path = project.write("shop/tasks.py", head + textwrap.dedent(code).lstrip())
        project.migrate()
        body = path.read_text().partition("\n\n")[2]
        return body.strip()

    return rewrite


@pytest.fixture
def called(project: Project) -> Rewrite:
    """What a statement of a function becomes that has imported the tasks."""

    def rewrite(code: str, imports: str = "", name: str = "shop/views.py") -> str:
        head = f"from shop.tasks import add, export, publish, send, several\n{imports}\n\n"
        body = textwrap.indent(textwrap.dedent(code).strip(), "    ")
        path = project.write(name, f"{head}def act(order):\n{body}\n")
        project.migrate()
        return textwrap.dedent(path.read_text().partition("def act(order):\n")[2]).strip()

    return rewrite


# --- Declarations ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("celery", "here"),
    [
        ("@shared_task", "@job"),
        ("@shared_task()", "@job"),
        ('@shared_task(name="shop.x", queue="mails")', '@job(name="shop.x", queue="mails")'),
        ("@shared_task(ignore_result=True, acks_late=True)", "@job"),
        (
            "@shared_task(autoretry_for=(OSError,), max_retries=2)",
            "@job(retry_on=(OSError,), max_attempts=3)",
        ),
        (
            "@shared_task(autoretry_for=(OSError,), retry_backoff=True)",
            "@job(retry_on=(OSError,), backoff=exponential(1, max=600), max_attempts=4)",
        ),
        (
            "@shared_task(autoretry_for=(E,), retry_kwargs={'max_retries': N, 'countdown': 9})",
            "@job(retry_on=(E,), backoff=9, max_attempts=N + 1)",
        ),
        ("@shared_task(rate_limit=10)", '@job(rate="10/s")'),
        ('@shared_task(rate_limit="10/m")', '@job(rate="10/m")'),
        ("@shared_task(time_limit=60, soft_time_limit=50)", "@job(timeout=60)"),
        ("@shared_task(soft_time_limit=50)", "@job(timeout=50)"),
        ("@shared_task(priority=9)", "@job(priority=9)"),
        ("@shared_task(bind=False, serializer='json')", "@job"),
    ],
)
def test_a_declaration_becomes(celery: str, here: str, declared: Rewrite) -> None:
    assert declared(f"{celery}\ndef act(x): ...") == f"{here}\ndef act(x): ..."


@pytest.mark.parametrize(
    ("celery", "why"),
    [
        ("@shared_task(base=Logged)\ndef act(x): ...", "Logged is in no file that was read"),
        ("@shared_task(expires=60)\ndef act(x): ...", "expires=… has no equal"),
        ("@shared_task(max_retries=None)\ndef act(x): ...", "tries for ever"),
        ("@shared_task(**options)\ndef act(x): ...", "by * or **"),
        ("@shared_task(serializer='pickle')\ndef act(x): ...", "JSON"),
        ("@shared_task(priority=255)\ndef act(x): ...", "from -100 to 100"),
        ("@shared_task(rate_limit=LIMIT)\ndef act(x): ...", "'10/m'"),
        ("@shared_task\ndef act(*xs): ...", "*xs"),
        ("@shared_task\ndef act(x, /): ...", "'/'"),
        ("@shared_task(bind=True)\ndef act(self): log(self)", "self as a value"),
        ("@shared_task(bind=True)\ndef act(self): self.retry(eta=1)", "eta"),
        ("@shared_task(bind=True)\ndef act(self): x = self.retry() if y else 1", "whole statement"),
        ("@shared_task(bind=True)\ndef act(self): log(self.retry())", "whole statement"),
        ("@shared_task(bind=True)\ndef act(self): later(self.delay)", "uses self.delay"),
        ("@shared_task(bind=True)\ndef act(self, x): self.delay(*x)", "uses self.delay"),
        ("@shared_task(bind=True)\ndef act(self, x): self.delay(1, 2)", "uses self.delay"),
        ("@shared_task(bind=True)\ndef act(self): self.s().delay()", "uses self.s"),
        ("@shared_task(bind=True)\ndef act(self, x): self.apply_async(x)", "self.apply_async"),
        (
            "@shared_task(bind=True)\ndef act(self): self.apply_async(link=1)",
            "uses self.apply_async",
        ),
        ("@shared_task(bind=True)\ndef act(self): self.max_retries = 9", "uses self.max_retries"),
        ("@shared_task\ndef act(): raise celery.exceptions.Ignore()", "Celery's Ignore"),
    ],
)
def test_a_declaration_is_left(celery: str, why: str, declared: Rewrite, project: Project) -> None:
    # When
    code = declared(celery)
    # Then
    assert code == celery
    assert why in project.reasons[0]
    assert project.report.counts["declarations", "left"] == 1


@pytest.mark.parametrize(
    "name", ["exceptions.MaxRetriesExceededError", "exceptions.Reject", "current_task"]
)
def test_a_task_that_uses_what_celery_alone_has_is_left(name: str, project: Project) -> None:
    # Given
    where, _, last = f"celery.{name}".rpartition(".")
    code = f"from celery import shared_task\nfrom {where} import {last}\n\n"
    path = project.write("shop/tasks.py", f"{code}@shared_task\ndef act():\n    log({last})\n")
    before = path.read_text()
    # When
    project.migrate()
    # Then
    assert path.read_text() == before
    assert any(f"uses Celery's {last}" in each for each in project.reasons)


BASE = """
from celery import Task
from shop.errors import Gone

LIMIT = 5


class Patient(Task):
    abstract = True
    max_retries = 2
    autoretry_for = (Gone,)
    acks_late = True


class Slow(Patient):
    time_limit: int = 900
    retry_backoff = True
    max_retries = LIMIT
"""


@pytest.fixture
def based(project: Project) -> Rewrite:
    """What a declaration becomes whose base classes are those of ``shop/base.py``."""

    def rewrite(code: str, base: str = BASE, imports: str = "from shop.base import Slow") -> str:
        project.write("shop/base.py", base)
        head = f"from celery import shared_task\n{imports}\n\n\n"
        path = project.write("shop/tasks.py", head + textwrap.dedent(code).lstrip())
        project.migrate()
        return path.read_text()

    return rewrite


def test_the_attributes_of_a_base_class_become_options_of_its_tasks(
    based: Rewrite, project: Project
) -> None:
    # When
    code = based("@shared_task(base=Slow, queue='a')\ndef act(x): ...\n")
    # Then
    assert code == (
        "from kjo_django import exponential, job\n"
        "from shop.base import LIMIT\n"
        "from shop.errors import Gone\n\n\n"
        "@job(queue='a', retry_on=(Gone,), timeout=900, backoff=exponential(1, max=600), "
        "max_attempts=LIMIT + 1)\n"
        "def act(x): ...\n"
    )
    assert project.report.counts["declarations", "left"] == 0
    assert project.reasons.count("class Slow: its options are those of act now") == 1
    assert project.reasons.count("class Patient: its options are those of act now") == 1


def test_an_option_of_the_decorator_is_stronger_than_that_of_the_base_class(
    based: Rewrite,
) -> None:
    # When
    code = based("@shared_task(base=Slow, max_retries=0, time_limit=None)\ndef act(x): ...\n")
    # Then
    assert "max_attempts=1" in code
    assert "LIMIT" not in code
    assert "timeout" not in code


def test_a_class_that_two_bases_share_is_the_last_to_be_asked(based: Rewrite) -> None:
    # Given
    base = """
        from celery import Task

        class Common(Task):
            priority = 1

        class Left(Common): ...

        class Right(Common):
            priority = 2

        class Both(Left, Right): ...
    """
    # When
    code = based("@shared_task(base=Both)\ndef act(x): ...\n", base, "from .base import Both")
    # Then
    assert "@job(priority=2)" in code


def test_celerys_own_class_gives_nothing(based: Rewrite) -> None:
    code = based("@shared_task(base=Task)\ndef act(x): ...\n", imports="from celery import Task")
    assert code.endswith("@job\ndef act(x): ...\n")
    assert "celery" not in code


INSTALLED = """
    import socket
    from celery import Task
    from .conf import LIMITS
    from .errors import Gone

    LIMIT = 5


    class Patient(Task):
        autoretry_for = (Gone, socket.timeout)
        max_retries = LIMIT
        soft_time_limit = LIMITS.SOFT

        def on_failure(self, *args): ...
"""


def test_a_base_class_of_an_installed_package_is_read_and_not_changed(
    based: Rewrite, project: Project
) -> None:
    # Given
    package = project.write("site-packages/patience/tasks.py", INSTALLED)
    project.write("site-packages/patience/__init__.py", "from .tasks import Patient\n")
    before = package.read_text()
    imports = "from patience import Patient"
    # When
    code = based("@shared_task(base=Patient)\ndef act(x): ...\n", "", imports)
    # Then
    assert code == (
        "import socket\n\n"
        "from kjo_django import job\n"
        "from patience.conf import LIMITS\n"
        "from patience.errors import Gone\n"
        "from patience.tasks import LIMIT\n\n\n"
        "@job(retry_on=(Gone, socket.timeout), timeout=LIMITS.SOFT, max_attempts=LIMIT + 1)\n"
        "def act(x): ...\n"
    )
    assert package.read_text() == before
    (failure,) = [each for each in project.report.findings if each.what == "Patient.on_failure"]
    assert (failure.file.endswith("patience/tasks.py"), failure.line) == (True, 14)
    assert "the base class of act" in failure.why
    assert "signals.job_failed" in failure.to_do
    assert not any("class Patient" in reason for reason in project.reasons)


def test_a_base_class_of_an_installed_package_that_changes_calls_keeps_its_tasks(
    based: Rewrite, project: Project
) -> None:
    # Given
    own = "from celery import Task\n\n\nclass Own(Task):\n    def __call__(self): ...\n"
    project.write("site-packages/tenants.py", own)
    # When
    code = based("@shared_task(base=Own)\ndef act(x): ...\n", "", "from tenants import Own")
    # Then
    assert "@shared_task(base=Own)" in code
    (reason,) = [each for each in project.reasons if "Own" in each]
    assert "site-packages/tenants.py:5) has __call__()" in reason


def test_a_package_that_is_not_there_or_cannot_be_read_is_as_unknown_as_before(
    based: Rewrite, project: Project
) -> None:
    project.write("site-packages/broken.py", "class Own(:\n")
    for name in ("broken", "missing"):
        based("@shared_task(base=Own)\ndef act(x): ...\n", "", f"from {name} import Own")
        (reason,) = [each for each in project.reasons if "Own" in each]
        assert "its base class Own is in no file that was read" in reason
    (finding,) = [each for each in project.report.findings if "Own" in each.why]
    assert "--packages" in finding.to_do


def test_a_task_of_an_installed_package_is_no_task_of_the_project(project: Project) -> None:
    # Given
    package = "from celery import shared_task\n\n\n@shared_task\ndef sync(x): ...\n"
    project.write("site-packages/other/tasks.py", package)
    view = "from other.tasks import sync\n\n\ndef act():\n    sync.delay(1)\n"
    path = project.write("shop/views.py", view)
    # When
    report = project.migrate()
    # Then
    assert path.read_text() == view
    assert report.counts["declarations", "left"] + report.counts["declarations", "changed"] == 5


def test_a_folder_of_packages_has_to_be_there(project: Project) -> None:
    with pytest.raises(CommandError, match="There is no folder"):
        call_command("kjo_migrate_celery", str(project.folder), packages=[project.folder / "no"])


def test_what_a_base_class_does_after_a_task_is_named_by_its_line(
    based: Rewrite, project: Project
) -> None:
    # Given
    base = """
        from celery import Task


        class Logged(Task):
            def on_failure(self, exc, task_id, args, kwargs, einfo):
                log(exc)

            def on_success(self, retval, task_id, args, kwargs):
                log(retval)

            def note(self): ...
    """
    # When
    tasks = "".join(f"@shared_task(base=Logged)\ndef act{n}(x): ...\n\n\n" for n in range(5))
    code = based(tasks, base, "from shop.base import Logged")
    # Then
    assert code.count("@job\n") == 5
    found = {each.what: each for each in project.report.findings}
    failure = found["Logged.on_failure"]
    assert (failure.file.rpartition("/")[2], failure.line, failure.is_left) == ("base.py", 5, True)
    assert failure.why.endswith("the base class of act0, act1, act2 and 2 more")
    assert "signals.job_failed" in failure.to_do
    assert "signals.job_completed" in found["Logged.on_success"].to_do
    assert "Logged.note" not in found


def test_the_methods_of_a_class_without_celery_in_its_file_are_named(
    based: Rewrite, project: Project
) -> None:
    # Given
    project.write("shop/mixins.py", "class Noted:\n    def after_return(self): ...\n")
    base = """
        from celery import Task
        from .mixins import Noted

        class Both(Noted, Task): ...
    """
    # When
    based("@shared_task(base=Both)\ndef act(x): ...\n", base, "from shop.base import Both")
    # Then
    assert any(each.startswith("Noted.after_return") for each in project.reasons)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("def __call__(self, *a, **k): ...", "base.py:6) has __call__()"),
        ("def apply_async(self, *a, **k): ...", "base.py:6) has apply_async()"),
        ("serializer = 'pickle'", "payloads here are JSON"),
        ("expires = 60", "expires=… has no equal"),
        ("max_retries = None", "tries for ever"),
        ("N = 7; max_retries = N", "and N has no name in the task's file"),
        ("autoretry_for = (Lost,)", "and Lost has no name in the task's file"),
        ("autoretry_for = (OSError,)", "and OSError has no name in the task's file"),
        ("if DEBUG: max_retries = 1", "sets max_retries by a condition"),
        ("def helper(self): ...", "uses self.helper"),
    ],
)
def test_a_task_with_a_base_class_is_left(
    body: str, why: str, based: Rewrite, project: Project
) -> None:
    # Given
    base = f"from celery import Task\nfrom .errors import Lost\n\n\nclass Own(Task):\n    {body}\n"
    code = "OSError = 1\n\n\n@shared_task(base=Own, bind=True)\ndef act(self): self.helper()\n"
    if "helper" not in body:
        code = code.replace("self.helper()", "...")
    # When
    after = based(code, base, "from shop.base import Own")
    # Then
    assert "@shared_task(base=Own, bind=True)" in after
    assert any(why in each for each in project.reasons), project.reasons
    assert not any("its options are those of" in each for each in project.reasons)


def test_a_class_of_celery_once_is_answered_by_unique_jobs(
    based: Rewrite, project: Project
) -> None:
    # Given
    own = "from celery_once import QueueOnce as Once\n\n\nclass Own(Once): ...\n"
    code = "@shared_task(base=Own)\ndef act(): ...\n"
    # When
    based(code, own, imports="from shop.base import Own")
    # Then
    assert any("unique_for" in each.to_do for each in project.report.findings)


def test_a_result_that_celery_did_not_keep_is_named(declared: Rewrite, project: Project) -> None:
    declared("@shared_task(ignore_result=True)\ndef act(): return 7")
    assert any("which is kept here" in each for each in project.reasons)


def test_a_decorator_of_an_application_that_was_not_found_is_named(
    declared: Rewrite, project: Project
) -> None:
    # When
    declared("@elsewhere.task\ndef act(): ...")
    # Then
    assert project.report.counts["declarations", "left"] == 1
    assert any("what elsewhere is was not found" in each for each in project.reasons)


def test_a_bound_task_takes_a_context(declared: Rewrite) -> None:
    assert (
        declared(
            """
        @shared_task(bind=True, max_retries=5)
        def act(self, x):
            try:
                log(self.request.id, self.request.retries, self.name)
                return self.max_retries
            except OSError as exc:
                raise self.retry(exc=exc, countdown=2 ** self.request.retries)
            self.retry()
            self.apply_async((x,), countdown=5)
        """
        )
        == textwrap.dedent(
            """
        @job(takes_context=True, max_attempts=6, retry_on=(Retry,))
        def act(context, x):
            try:
                log(context.job_id, (context.attempt - 1), context.handler)
                return (context.max_attempts - 1)
            except OSError as exc:
                raise Retry(str(exc), delay=2 ** (context.attempt - 1)) from exc
            raise Retry()
            act.using(delay=5).enqueue(x=x)
        """
        ).strip()
    )


def test_a_context_has_another_name_where_that_one_is_taken(declared: Rewrite) -> None:
    assert (
        declared("@shared_task(bind=True)\ndef act(self, context): return self.request.id")
        == "@job(takes_context=True)\ndef act(job_context, context): return job_context.job_id"
    )


def test_a_name_that_the_file_has_already_is_imported_by_another(project: Project) -> None:
    # Given
    path = project.write(
        "shop/tasks.py", "from celery import shared_task\njob = 7\n\n@shared_task\ndef a(): ...\n"
    )
    # When
    project.migrate()
    # Then
    assert "from kjo_django import job as kjo_django_job\n" in path.read_text()
    assert "@kjo_django_job\ndef a(): ..." in path.read_text()


def test_two_tasks_of_an_app_that_have_one_name_keep_those_of_celery(project: Project) -> None:
    # Given
    code = "from celery import shared_task\n\n@shared_task\ndef clean(): ...\n"
    first = project.write("shop/tasks.py", code)
    second = project.write("shop/nightly.py", code)
    # When
    project.migrate()
    # Then
    assert '@job(name="shop.tasks.clean")' in first.read_text()
    assert '@job(name="shop.nightly.clean")' in second.read_text()


def test_the_app_of_a_project_declares_tasks_too(project: Project) -> None:
    # Given
    project.write("bazaar/celery.py", 'from celery import Celery\napp = Celery("bazaar")\n')
    path = project.write(
        "shop/tasks.py", "from bazaar.celery import app\n\n@app.task(queue='a')\ndef a(): ...\n"
    )
    # When
    project.migrate()
    # Then
    assert path.read_text() == "from kjo_django import job\n\n@job(queue='a')\ndef a(): ...\n"


def test_comments_of_options_stay(declared: Rewrite) -> None:
    code = declared(
        """
        @shared_task(
            queue="mails",  # its own worker
            max_retries=3,
            autoretry_for=(OSError,),  # the server is down at night
        )
        def act(x): ...
        """
    )
    assert '    queue="mails",  # its own worker\n    max_attempts=4,\n' in code
    assert "    retry_on=(OSError,),  # the server is down at night\n)" in code


# --- Calls ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("celery", "here"),
    [
        ("send.delay(7)", "send.enqueue(order_id=7)"),
        ("send.delay(7, copy=True)", "send.enqueue(order_id=7, copy=True)"),
        ("send.delay(**order)", "send.enqueue(**order)"),
        ("send.delay_on_commit(7)", "send.enqueue(order_id=7)"),
        ("send.apply_async((7,), {'copy': True})", "send.enqueue(order_id=7, copy=True)"),
        ("send.apply_async(kwargs=dict(order_id=7))", "send.enqueue(order_id=7)"),
        (
            "send.apply_async([7], countdown=60, queue='a', priority=9, retry=False)",
            "send.using(delay=60, queue='a', priority=9).enqueue(order_id=7)",
        ),
        (
            "send.apply_async([7], eta=order.due, task_id='o-7', headers={'a': 'b'})",
            "send.using(run_at=order.due, id='o-7', headers={'a': 'b'}).enqueue(order_id=7)",
        ),
        (
            "send.apply_async([7], expires=60 * 2)",
            "send.using(expires_at=timezone.now() + timedelta(seconds=60 * 2)).enqueue(order_id=7)",
        ),
        ("x = send.delay(7).get(timeout=3)", "x = send.enqueue(order_id=7).wait(timeout=3)"),
        (
            "r = send.delay(7)\nr.get(timeout=3)",
            "r = send.enqueue(order_id=7)\nr.wait(timeout=3)",
        ),
        ("return send.delay(7).task_id", "return send.enqueue(order_id=7).id"),
        ("send.run(7)", "send(order_id=7)"),
        ("send(7)", "send(7)"),
        ("send.s(7).delay()", "send.enqueue(order_id=7)"),
        ("send.s(7).apply_async(countdown=5)", "send.using(delay=5).enqueue(order_id=7)"),
    ],
)
def test_a_call_becomes(celery: str, here: str, called: Rewrite) -> None:
    assert called(celery) == here


@pytest.mark.parametrize(
    ("celery", "why"),
    [
        ("send.delay(*order)", "given by *"),
        ("send.delay(7, True, 8)", "more arguments"),
        ("send.delay(7, copies=2)", "takes no argument copies"),
        ("send.apply_async(args=order)", "not a literal"),
        ("send.apply_async((7,), **order)", "given by **"),
        ("send.apply_async((7,), link=publish.s(1))", "link=…"),
        ("send.apply_async((7,), eta=datetime.now())", "no time zone"),
        ("send.apply_async((7,), expires=order.end)", "seconds or a moment"),
        ("several.delay(7)", "several is left"),
        ("order.task.delay(7)", "was not found"),
        ("export(7)", "takes a context"),
        ("send.apply((7,))", "EagerResult"),
        ("send.chunks([7], 2)", "chunks"),
        ("act_on(send.delay)", "passed on"),
        ("current_app.send_task('shop.tasks.send', args=[7])", "shop/tasks.py:6"),
        ("app.control.revoke(order.task)", "control"),
        ("send.delay(7).revoke()", "no revoke"),
        ("send.apply_async((7,), order)", "kwargs=order is not a literal"),
        ("send.apply_async(kwargs={'order_id': 1, **order})", "is not a literal"),
        ("send.apply_async(kwargs=dict(**order))", "is not a literal"),
        ("cb = send.apply_async", "no apply_async"),
        ("cb = partial(send.apply_async, (7,))", "no apply_async"),
        ("cb = send.delay", "passed on"),
        ("cb = partial(send.delay, copy=True)", "whoever calls it gives order_id"),
        ("cb = send.s", "no s as a task"),
        ("map(send.s, order)", "no s as a task"),
        ("sync_to_async(send.apply_async)", "no apply_async"),
        ('getattr(send, "delay")(7)', "by text"),
        ('setattr(send, "using", order)', "by text"),
        ("log(send.request.id)", "no request"),
        ("log(send.max_retries)", "no max_retries"),
        ("send.retry()", "no retry()"),
        ("task_failure.connect(log)", "signals are not sent"),
        ("current_app.conf.update(timezone='UTC')", "are not read"),
        ("current_app.conf.beat_schedule = {}", "are not read"),
        ("current_app.conf.beat_schedule['x'] = {}", "are not read"),
    ],
)
def test_a_call_is_left(celery: str, why: str, called: Rewrite, project: Project) -> None:
    # When
    imports = "from functools import partial; from asgiref.sync import sync_to_async; "
    imports += "from celery import current_app; from celery.signals import task_failure"
    code = called(celery, imports)
    # Then
    found = [each for each in project.report.findings if each.file.endswith("views.py")]
    left = [each for each in found if each.is_left]
    assert why in left[0].why
    assert left[0].line == 5
    assert ".enqueue(" not in code or "revoke" in code


@pytest.mark.parametrize(
    ("celery", "why"),
    [
        ("r = send.delay(7)\nr.get()", "waits for ever"),
        ("r = send.delay(7)\nr.get(timeout=None)", "waits for ever"),
        ("r = send.delay(7)\nr.get(timeout=order)", "waits for ever"),
        ("r = send.delay(7)\nlog(r.get)", "no get"),
        ("r = send.delay(7)\nlog(r.status)", "no status"),
        ("r = send.delay(7)\nlog(r.info, 1)", "no info"),
        ("r = send.delay(7)\nlog(r.traceback)", "no traceback"),
        ("r = send.delay(7)\nr.then(log)", "no then"),
        ("r = send.delay(7)\nlog(str(r))", "text of a result"),
        ("r = send.delay(7)\nlog(f'{r}')", "text of a result"),
        ("order.result = send.delay(7)", "what is kept or passed on is a handle"),
        ("x = [send.delay(7)]", "what is kept or passed on is a handle"),
        ("log(send.delay(7))", "what is kept or passed on is a handle"),
        ("r: object = send.delay(7)\nlog(r.status)", "no status"),
        ("log((r := send.delay(7)) and r.status)", "no status"),
        ("return send.delay(7)", "what is returned is a handle"),
    ],
)
def test_what_is_asked_of_a_result_is_named(
    celery: str, why: str, called: Rewrite, project: Project
) -> None:
    # When
    code = called(celery)
    # Then
    assert code == celery.replace("send.delay(7)", "send.enqueue(order_id=7)")
    assert [why in each for each in project.reasons if "views" in each or why in each] == [True]


@pytest.mark.parametrize(
    "binding",
    [
        "for send in order: pass",
        "with order as send: pass",
        "(send := order)",
        "[send for send in order]",
        "send, x = order",
        "try: pass\nexcept OSError as send: pass",
        "def send(): pass",
    ],
)
def test_a_name_that_a_function_binds_is_no_task(
    binding: str, called: Rewrite, project: Project
) -> None:
    assert called(f"{binding}\nsend.delay(7)").endswith("send.delay(7)")
    assert any("was not found" in each for each in project.reasons)


@pytest.mark.parametrize("line", ["from shop.mail import send", "\nsend = order(send)\n"])
def test_a_name_that_a_module_binds_twice_is_no_task(
    line: str, called: Rewrite, project: Project
) -> None:
    assert called("send.delay(7)", line) == "send.delay(7)"
    assert any("was not found" in each for each in project.reasons)


def test_a_name_that_a_function_imports_is_a_task(called: Rewrite) -> None:
    code = "from shop.tasks import publish as p\np.delay(7)"
    assert called(code) == code.replace("delay(7)", "enqueue(album=7)")


@pytest.mark.parametrize("comment", ["# the first", "# noqa: COM812"])
def test_a_comment_that_a_rewrite_loses_is_named(
    comment: str, called: Rewrite, project: Project
) -> None:
    # When
    code = called(f"send.apply_async(\n    (7,),  {comment}\n    countdown=5,\n)")
    # Then
    assert code == "send.using(delay=5).enqueue(order_id=7)"
    assert any(each.startswith(f"{comment}: it was within") for each in project.reasons)


def test_a_generator_expression_awaits_nothing(project: Project) -> None:
    # Given
    code = (
        "from shop.tasks import send\n\n\nasync def act(ids):\n    f(send.delay(i) for i in ids)\n"
    )
    path = project.write("shop/views.py", code)
    # When
    project.migrate()
    # Then
    assert path.read_text() == code
    assert any("generator expression" in each for each in project.reasons)


def test_a_coroutine_awaits_the_enqueue(project: Project) -> None:
    # Given
    path = project.write(
        "shop/views.py",
        """
        from asgiref.sync import sync_to_async
        from shop import tasks

        async def act():
            handle = tasks.send.delay(7)
            await sync_to_async(tasks.send.delay)(8)
            return tasks.send.delay(9).id
        """,
    )
    # When
    project.migrate()
    # Then
    assert (
        path.read_text()
        == textwrap.dedent(
            """
        from shop import tasks

        async def act():
            handle = await tasks.send.aenqueue(order_id=7)
            await tasks.send.aenqueue(order_id=8)
            return (await tasks.send.aenqueue(order_id=9)).id
        """
        ).lstrip()
    )


@pytest.mark.parametrize(
    ("celery", "here"),
    [
        ("transaction.on_commit(lambda: send.delay(order.pk))", "send.enqueue(order_id=order.pk)"),
        ("transaction.on_commit(partial(send.delay, 7))", "send.enqueue(order_id=7)"),
        (
            "transaction.on_commit(lambda: chain(send.si(7), publish.si(8))())",
            "chain(send.step(order_id=7), publish.step(album=8)).enqueue()",
        ),
        (
            "transaction.on_commit(lambda: send.delay(7), using='other')",
            "transaction.on_commit(lambda: send.enqueue(order_id=7), using='other')",
        ),
        ("transaction.on_commit(lambda: print(7))", "transaction.on_commit(lambda: print(7))"),
        (
            "order.save()\ntransaction.on_commit(lambda: send.delay(str(order.pk)))\nreturn order",
            "order.save()\nsend.enqueue(order_id=str(order.pk))\nreturn order",
        ),
        (
            "transaction.on_commit(lambda: send.delay(order.pk))\nsend.delay(8)",
            "send.enqueue(order_id=order.pk)\nsend.enqueue(order_id=8)",
        ),
    ],
)
def test_an_enqueue_needs_no_on_commit(celery: str, here: str, called: Rewrite) -> None:
    imports = "from functools import partial\nfrom celery import chain\n"
    assert called(celery, imports + "from django.db import transaction") == here


@pytest.mark.parametrize(
    ("before", "argument", "after"),
    [
        ("", "order.pk", "order.save()"),
        ("", "order.pk", "order.owner.save()"),
        ("", "order", "order = 8"),
        ("", "order", "order += 8"),
        ("", "order.pk", "order.pk = 8"),
        ("", "order[0]", "order[0] = 8"),
        ("", "order", "for order in (): pass"),
        ("", "order.name()", ""),
        ("", "str(order.name())", ""),
        ("for x in order: ", "x", ""),
        ("order.pk = 1\nwhile order.pk: ", "order.pk", "order.refresh()"),
    ],
)
def test_on_commit_stays_where_a_value_may_change_before_it(
    before: str, argument: str, after: str, called: Rewrite, project: Project
) -> None:
    # When
    code = called(
        f"{before}transaction.on_commit(lambda: send.delay({argument}))\n{after}",
        "from django.db import transaction",
    )
    # Then
    assert f"transaction.on_commit(lambda: send.enqueue(order_id={argument}))" in code
    assert any("at the commit" in each for each in project.reasons)


def test_on_commit_stays_in_a_coroutine(project: Project) -> None:
    # Given
    path = project.write(
        "shop/views.py",
        """
        from django.db import transaction
        from shop.tasks import send

        async def act():
            transaction.on_commit(lambda: send.delay(7))
        """,
    )
    # When
    project.migrate()
    # Then
    assert "transaction.on_commit(lambda: send.enqueue(order_id=7))" in path.read_text()
    assert any("in a coroutine" in each for each in project.reasons)


@pytest.mark.parametrize(
    "how", ["from shop import tasks as t", "import shop.tasks as t", "from . import tasks as t"]
)
def test_a_task_is_known_by_whatever_name_it_is_imported(how: str, project: Project) -> None:
    # Given
    path = project.write("shop/views.py", f"{how}\n\nt.send.delay(7)\n")
    # When
    project.migrate()
    # Then
    assert path.read_text().endswith("t.send.enqueue(order_id=7)\n")


def test_a_task_is_known_through_the_package_that_exports_it(project: Project) -> None:
    # Given
    project.write(
        "shop/api/__init__.py", "from shop.tasks import *\nfrom ..tasks import send as s\n"
    )
    path = project.write(
        "shop/views.py", "from shop.api import s, add\n\ns.delay(7)\nadd.delay(1, 2)\n"
    )
    # When
    project.migrate()
    # Then
    assert path.read_text().endswith("s.enqueue(order_id=7)\nadd.enqueue(total=1, amount=2)\n")


def test_a_parameter_of_the_same_name_is_no_task(project: Project) -> None:
    # Given
    code = "from shop.tasks import send\n\n\ndef act(send):\n    return send.delay(7)\n"
    path = project.write("shop/views.py", code)
    # When
    project.migrate()
    # Then
    assert path.read_text() == code


# --- Chains, groups, chords -----------------------------------------------------------------------

CANVAS = "from celery import chain, chord, group"


@pytest.mark.parametrize(
    ("celery", "here"),
    [
        (
            "chain(add.s(1, 2), add.s(3))()",
            "chain(add.step(total=1, amount=2), add.step(amount=3)).enqueue()",
        ),
        (
            "chain(add.s(1, 2), send.s(True)).delay()",
            "chain(add.step(total=1, amount=2), send.step(copy=True)).enqueue()",
        ),
        (
            "(add.s(1, 2) | add.s(3) | publish.si(4)).apply_async()",
            "chain(add.step(total=1, amount=2), add.step(amount=3), publish.step(album=4))"
            ".enqueue()",
        ),
        (
            "chain([send.si(1), send.si(2)]).delay()",
            "chain(*[send.step(order_id=1), send.step(order_id=2)]).enqueue()",
        ),
        (
            "chain(send.si(add.delay(1, 2).id), publish.si(4)).delay()",
            "chain(send.step(order_id=add.enqueue(total=1, amount=2).id), "
            "publish.step(album=4)).enqueue()",
        ),
        (
            "group(send.s(n) for n in order).delay()",
            "group(send.step(order_id=n) for n in order).enqueue()",
        ),
        (
            "steps = [send.s(1)]\nchord(steps)(publish.si(7))",
            "steps = [send.step(order_id=1)]\ngroup(steps).then(publish.step(album=7)).enqueue()",
        ),
        (
            "chord(group(send.s(1)), publish.si(7)).delay()",
            "group(group(send.step(order_id=1))).then(publish.step(album=7)).enqueue()",
        ),
        (
            "flow = chain(add.s(1, 2), publish.s())\nflow.delay()",
            "flow = chain(add.step(total=1, amount=2), publish.step())\nflow.enqueue()",
        ),
        ("x = send.s(7).set(queue='a')", "x = send.using(queue='a').step(order_id=7)"),
    ],
)
def test_a_canvas_becomes(celery: str, here: str, called: Rewrite) -> None:
    assert called(celery, CANVAS) == here


@pytest.mark.parametrize(
    ("celery", "why"),
    [
        ("chord([add.s(1, 2)])(publish.s())", "results of all members"),
        ("chain(send.s(1), add.s()).delay()", "lacks total, amount"),
        ("chain(add.s(1, 2), order.step).delay()", "not known"),
        ("chain(*order).delay()", "first is not seen"),
        ("chain(add.s(1, 2)).apply_async(countdown=5)", "with options"),
        ("group(several.s(1)).delay()", "several is left"),
        ("x = add.s(1)", "gives add its amount"),
        ("x = send.s(7).set(countdown=5)", "not at a time"),
        ("x = chain(send.s(7), publish.si(8))()", "result is used"),
        ("group(send.s(7)).apply_async().get()", "result is used"),
        ("group(send.s(7))().join()", "result is used"),
        ("log(send.s(7).delay())", "result is used"),
    ],
)
def test_a_canvas_is_left_as_a_whole(
    celery: str, why: str, called: Rewrite, project: Project
) -> None:
    # When
    code = called(f"{celery}\ny = send.s(1)", CANVAS)
    # Then
    assert code == f"{celery}\ny = send.s(1)"
    assert any(why in reason for reason in project.reasons)
    assert any("what it is used with" in reason for reason in project.reasons)


def test_a_canvas_that_is_returned_is_named(called: Rewrite, project: Project) -> None:
    # When
    code = called("flow = chain(send.si(7), publish.si(8))\nreturn flow.delay()", CANVAS)
    # Then
    assert code.endswith("return flow.enqueue()")
    assert any("what is returned is a handle" in each for each in project.reasons)


# --- Mocks ----------------------------------------------------------------------------------------

MOCK = """from unittest import mock
from unittest import mock as mk
from unittest.mock import call, patch
"""


@pytest.mark.parametrize(
    ("celery", "here"),
    [
        (
            'with patch("shop.tasks.send.delay") as m:\n    pass\nm.assert_called_once_with(7)',
            'with patch("shop.tasks.send.enqueue") as m:\n    pass\n'
            "m.assert_called_once_with(order_id=7)",
        ),
        (
            'm = mocker.patch("shop.views.send.delay")\nm.assert_any_call(7, copy=True)',
            'm = mocker.patch("shop.views.send.enqueue")\nm.assert_any_call(order_id=7, copy=True)',
        ),
        (
            'm = mock.patch.object(send, "delay").start()\nassert m.mock_calls == [call(7)]',
            'm = mock.patch.object(send, "enqueue").start()\n'
            "assert m.mock_calls == [call(order_id=7)]",
        ),
        (
            'monkeypatch.setattr(send, "delay", order)\nsend.delay.assert_called_with(7)',
            'monkeypatch.setattr(send, "enqueue", order)\n'
            "send.enqueue.assert_called_with(order_id=7)",
        ),
        (
            'with patch("shop.views.send") as m:\n    pass\nm.delay.assert_called_with(7)\n'
            "assert m.delay.call_count == 1",
            'with patch("shop.views.send") as m:\n    pass\n'
            "m.enqueue.assert_called_with(order_id=7)\n"
            "assert m.enqueue.call_count == 1",
        ),
        (
            'with patch("shop.tasks.add.apply_async") as m:\n    pass\n'
            "m.assert_called_once_with(args=(1, 2), countdown=9)",
            'with patch("shop.tasks.add.using") as m:\n    pass\n'
            "m.assert_called_once_with(delay=9)\n"
            "m.return_value.enqueue.assert_called_once_with(total=1, amount=2)",
        ),
        (
            'with patch("shop.tasks.publish.apply_async") as m:\n    pass\n'
            "m.assert_called_once_with((1,))",
            'with patch("shop.tasks.publish.enqueue") as m:\n    pass\n'
            "m.assert_called_once_with(album=1)",
        ),
        (
            "with override_settings(CELERY_TASK_ALWAYS_EAGER=True):\n    pass",
            "with immediate():\n    pass",
        ),
        ("export(7)", "perform(export, report_id=7)"),
        ("assert send(7) == 7", "assert send(7) == 7"),
    ],
)
def test_a_mock_becomes(celery: str, here: str, called: Rewrite, project: Project) -> None:
    project.write(
        "shop/views.py",
        """
        from shop.tasks import add, publish, send

        send.delay(7)
        add.apply_async((1, 2), countdown=9)
        publish.apply_async((1,))
        """,
    )
    assert called(celery, MOCK, "shop/test_views.py") == here


def test_mocks_are_the_parameters_of_decorated_tests(project: Project) -> None:
    # Given
    path = project.write(
        "shop/test_views.py",
        """
        from unittest.mock import patch

        class Tests:
            @patch("shop.tasks.add.delay")
            @patch("os.getcwd", new=str)
            @patch("shop.tasks.send.delay")
            def test(self, send, add):
                send.assert_called_once_with(7)
                add.assert_called_once_with(1, 2)
        """,
    )
    # When
    project.migrate()
    # Then
    code = path.read_text()
    assert "send.assert_called_once_with(order_id=7)" in code
    assert "add.assert_called_once_with(total=1, amount=2)" in code
    assert '@patch("os.getcwd", new=str)' in code


@pytest.mark.parametrize(
    ("celery", "why"),
    [
        ('patch("shop.other.send.delay")', "was not found"),
        ('patch("shop.tasks.several.delay")', "several is left"),
        ('with patch("shop.tasks.send.delay") as m:\n    pass\nm.call_args[0][1]', "by place"),
        ("x = override_settings(CELERY_TASK_ALWAYS_EAGER=True)", "are not run by the call"),
        ('with mk.patch("shop.tasks.send.delay") as m:\n    pass\nm.call_args[0][1]', "by place"),
        ('with patch("shop.tasks.send.delay") as m:\n    m.call_args_list[0][0]', "by place"),
        ('with patch("shop.tasks.send.delay") as m:\n    m.side_effect = lambda x: x', "by name"),
        ('monkeypatch.setattr(send, "delay", lambda x: x)', "by name"),
        ('patch.object(send, "delay", order)', "by name"),
        ('setattr(send, "delay", order)', "by text"),
        ('mocker.spy(send, "delay")', "spies on"),
        ('with patch("shop.tasks.send.delay") as m:\n    m.mock_calls[0].args', "by place"),
        (
            'with patch("shop.tasks.send.delay") as m:\n    for x in m.call_args_list: pass',
            "by place",
        ),
        ("settings.CELERY_TASK_ALWAYS_EAGER = True", "are not run by the call"),
    ],
)
def test_a_mock_is_left(celery: str, why: str, called: Rewrite, project: Project) -> None:
    called(celery, MOCK, "shop/test_views.py")
    found = [each for each in project.report.findings if each.file.endswith("test_views.py")]
    assert [why in each.why for each in found] == [True]


# --- Settings and modules -------------------------------------------------------------------------


def test_settings_become_one(project: Project) -> None:
    # Given
    path = project.write(
        "bazaar/settings.py",
        """
        from celery.schedules import crontab

        CELERY_BROKER_URL = "redis://"
        CELERY_TASK_TIME_LIMIT = 600
        CELERY_BEAT_SCHEDULE = {
            "nightly": {
                "task": "shop.tasks.publish",
                "schedule": crontab(hour="3", minute=0, day_of_week="monday,fri"),
                "args": (7,),
                "options": {"queue": "night"},
            },
            "often": {"task": "shop.tasks.send", "schedule": 300.0, "kwargs": {"order_id": 1}},
        }
        """,
    )
    # When
    project.migrate()
    # Then
    given: dict[str, Any] = {}
    exec(path.read_text(), given)
    assert "crontab" not in path.read_text()
    assert given["KJO"] == {
        "QUEUES": {"night": {}},
        "MAX_ATTEMPTS": 1,
        "TIMEOUT": 600,
        "SCHEDULES": {
            "nightly": {
                "job": "shop.publish",
                "cron": "0 3 * * mon,fri",
                "timezone": "UTC",
                "payload": {"album": 7},
                "queue": "night",
            },
            "often": {"job": "shop.send", "every": 300, "payload": {"order_id": 1}},
        },
    }


@pytest.mark.parametrize(
    ("queue", "head"),
    [
        ("MAILS", 'MAILS = "mails"'),
        ("constants.MAILS", "from shop import constants"),
        ("Queues.MAILS", 'class Queues:\n    MAILS = "mails"'),
        ("Queues.MAILS.value", "from shop.constants import Queues"),
        ("settings.MAILS", "from django.conf import settings"),
    ],
)
@pytest.mark.parametrize(
    "use", ["@shared_task(queue={})\ndef a(): ...", "send.apply_async((7,), queue={})"]
)
def test_the_settings_name_a_queue_that_is_a_constant(
    use: str, queue: str, head: str, project: Project
) -> None:
    # Given
    project.write("shop/constants.py", 'MAILS = "mails"\nclass Queues:\n    MAILS = "mails"\n')
    path = project.write("bazaar/settings.py", 'CELERY_BROKER_URL = "redis://"\nMAILS = "mails"\n')
    code = f"from celery import shared_task\nfrom shop.tasks import send\n{head}\n\n"
    project.write("shop/more.py", code + use.format(queue) + "\n")
    # When
    project.migrate()
    # Then
    assert '"QUEUES": {"mails": {}},' in path.read_text()
    assert not any(each.startswith("queue=") for each in project.reasons)


def test_the_settings_name_the_queue_of_a_base_class(based: Rewrite, project: Project) -> None:
    # Given
    path = project.write("bazaar/settings.py", 'CELERY_BROKER_URL = "redis://"\n')
    base = 'from celery import Task\nQ = "slow"\n\n\nclass Slow(Task):\n    queue = Q\n'
    # When
    code = based("@shared_task(base=Slow)\ndef act(): ...\n", base)
    # Then
    assert code.endswith("from shop.base import Q\n\n\n@job(queue=Q)\ndef act(): ...\n")
    assert '"QUEUES": {"slow": {}},' in path.read_text()


@pytest.mark.parametrize(
    "code",
    [
        "@shared_task(queue=environ['Q'])\ndef a(): ...",
        "@shared_task(queue=TWICE)\ndef a(): ...",
        "@shared_task(queue=settings.TWO)\ndef a(): ...",
        "@shared_task(queue=settings.NONE)\ndef a(): ...",
        "def act(ONCE): send.apply_async((7,), queue=ONCE)",
        "def act(): ONCE = 'x'; send.apply_async((7,), queue=ONCE)",
    ],
)
def test_a_queue_whose_name_is_not_known_is_named(code: str, project: Project) -> None:
    # Given
    path = project.write("bazaar/settings/base.py", 'CELERY_BROKER_URL = "redis://"\nTWO = "a"\n')
    project.write("bazaar/settings/live.py", 'TWO = "b"\n')
    head = "from celery import shared_task\nfrom django.conf import settings\n"
    head += "from shop.tasks import send\nTWICE = 'a'\nTWICE = 'b'\nONCE = 'c'\n"
    project.write("shop/more.py", head + code + "\n")
    # When
    project.migrate()
    # Then
    assert '"QUEUES": {},' in path.read_text()
    found = [each for each in project.report.findings if each.what.startswith("queue=")]
    assert [(Path(each.file).name, each.line) for each in found] == [("more.py", 7)]
    assert found[0].to_do == "name it in KJO['QUEUES']"


def test_a_schedule_that_cannot_be_moved_stays_with_all_of_them(project: Project) -> None:
    # Given
    path = project.write(
        "bazaar/settings.py",
        'CELERY_BEAT_SCHEDULE = {"dusk": {"task": "shop.tasks.send", "schedule": solar()}}\n',
    )
    # When
    project.migrate()
    # Then
    assert path.read_text().startswith("CELERY_BEAT_SCHEDULE")
    assert any("no number of seconds, timedelta or crontab" in each for each in project.reasons)


def test_an_app_finds_its_jobs_where_django_looks(project: Project) -> None:
    # When
    project.migrate()
    # Then
    assert "from . import tasks" in (project.folder / "shop/jobs.py").read_text()


@pytest.mark.parametrize(
    ("name", "files", "why"),
    [
        ("sale/tasks.py", [], "its folder is no package"),
        ("sale/tasks.py", ["sale/__init__.py", "sale/settings.py"], "the project's settings"),
        ("shop/class.py", [], "class is no name to import"),
        ("shop/send-all.py", [], "send-all is no name to import"),
    ],
)
def test_jobs_that_no_jobs_module_can_import_are_named(
    name: str, files: list[str], why: str, project: Project
) -> None:
    # Given
    (project.folder / "shop/tasks.py").unlink()
    project.write(name, "from celery import shared_task\n\n@shared_task\ndef act(): ...\n")
    for each in files:
        project.write(each, "")
    # When
    project.migrate()
    # Then
    assert not list(project.folder.rglob("jobs.py"))
    assert any(why in each for each in project.reasons)


def test_no_settings_to_write_are_named_once(project: Project) -> None:
    project.migrate()
    assert [each for each in project.reasons if "5 attempts" in each] == [
        "KJO: no settings of Celery were found to write KJO into, so each job has 5 attempts"
    ]


def test_a_module_of_jobs_that_is_there_is_not_written_over(project: Project) -> None:
    # Given
    path = project.write("shop/jobs.py", "MINE = 1\n")
    # When
    project.migrate()
    # Then
    assert path.read_text() == "MINE = 1\n"
    assert any("which is there already" in each for each in project.reasons)


def test_exceptions_and_the_logger_have_names_of_their_own(project: Project) -> None:
    # Given
    path = project.write(
        "shop/tasks.py",
        """
        from celery import shared_task
        from celery.exceptions import SoftTimeLimitExceeded
        from celery.utils.log import get_task_logger

        logger = get_task_logger(__name__)

        @shared_task
        def act():
            try:
                ...
            except SoftTimeLimitExceeded:
                logger.info("late")
        """,
    )
    # When
    project.migrate()
    # Then
    code = path.read_text()
    assert "celery" not in code
    assert "except HandlerTimeout:" in code
    assert "logger = logging.getLogger(__name__)" in code


# --- Runs -----------------------------------------------------------------------------------------


def test_a_project_without_celery_is_told_so(tmp_path: Path, capsys: Any) -> None:
    # Given
    (tmp_path / "views.py").write_text("def act(order):\n    order.delay(7)\n")
    # When
    call_command("kjo_migrate_celery", str(tmp_path))
    # Then
    assert capsys.readouterr().out == "No use of Celery in 1 files.\n"


def test_nothing_is_written_unless_asked_for(project: Project, capsys: Any) -> None:
    # Given
    before = (project.folder / "shop/tasks.py").read_text()
    # When
    with pytest.raises(SystemExit) as exited:
        call_command("kjo_migrate_celery", str(project.folder))
    # Then
    out = capsys.readouterr().out
    assert exited.value.code == 1
    assert "+@job\n def send(order_id, copy=False):" in out
    assert "task several: it takes *ids, and a job's arguments have names. To do: " in out
    assert "declarations: 4 changed, 1 left" in out
    assert (project.folder / "shop/tasks.py").read_text() == before


def test_a_script_reads_json(project: Project, capsys: Any) -> None:
    # When
    with pytest.raises(SystemExit):
        call_command("kjo_migrate_celery", str(project.folder), json=True, write=True)
    # Then
    answer = json.loads(capsys.readouterr().out)
    assert answer["written"] is True
    assert answer["counts"]["declarations"] == {"changed": 4, "left": 1}
    (left,) = [each for each in answer["findings"] if each["is_left"]]
    assert (left["line"], left["what"]) == (25, "task several")
    assert answer["diff"].startswith("--- a/")


def test_all_that_is_rewritten_exits_with_zero(project: Project, capsys: Any) -> None:
    # Given
    project.write("shop/tasks.py", TASKS.partition("@shared_task\ndef several")[0])
    project.write("bazaar/settings.py", 'CELERY_BROKER_URL = "redis://"\n')
    # When
    with pytest.raises(SystemExit):
        call_command("kjo_migrate_celery", str(project.folder), write=True)
    project.write("bazaar/settings.py", 'KJO = {"MAX_ATTEMPTS": 1}\n')
    call_command("kjo_migrate_celery", str(project.folder), write=True)
    # Then
    out = capsys.readouterr().out
    assert "3 of 4 files written." in out
    assert "No use of Celery in 5 files." in out


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("broken", b"def act(:\n", "invalid syntax"),
        ("null", b"x = 1\0\n", "null"),
        ("latin", b"x = '\xe9'\n", "encoding"),
        ("coding", b"# coding: nonsense\n", "nonsense"),
        ("idna", b"# coding: idna\nx = 1..2\nimport a..b\n", ""),
        ("deep", b"x = " + b"(" * 5000 + b")" * 5000, ""),
        ("nots", b"x = " + b"not " * 100_000 + b"1\n", ""),
        ("adds", b"import celery\nx = a" + b" + b" * 9_900 + b"\n", "nested too deeply"),
        ("dots", b"import celery\nx = a" + b".b" * 100_000 + b".delay()\n", ""),
        ("long", b"#" * 2_000_001, "2,000,000 bytes"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_and_nothing_is_written(
    name: str, data: bytes, why: str, project: Project
) -> None:
    # Given
    (project.folder / f"{name}.py").write_bytes(data)
    before = (project.folder / "shop/tasks.py").read_text()
    # When
    report = project.migrate()
    # Then
    ((path, found),) = report.unreadable.items()
    assert path.endswith(f"{name}.py")
    assert why in found
    assert report.counts["declarations", "changed"] == 4, "the rest goes on"
    assert not report.is_written
    assert (project.folder / "shop/tasks.py").read_text() == before


def test_a_file_whose_name_is_no_text_is_named(project: Project) -> None:
    # Given
    name = os.fsencode(project.folder) + b"/caf\xe9.py"
    try:
        Path(os.fsdecode(name)).write_text("x = 1\n")
    except OSError:
        pytest.skip("the file system takes no such name")
    # When
    report = project.migrate()
    # Then
    assert [path.endswith("caf\\xe9.py") for path in report.unreadable] == [True]
    assert json.dumps(report.as_dict()).encode()


def test_a_link_that_is_named_is_what_it_leads_to(project: Project, tmp_path: Path) -> None:
    # Given
    link = tmp_path / "linked.py"
    link.symlink_to(project.folder / "shop/tasks.py")
    # When
    migration = Migration([link])
    migration.rewrite()
    # Then
    assert migration.report.counts["declarations", "changed"] == 4


def test_the_code_is_parsed_and_never_run(project: Project) -> None:
    # Given
    project.write("shop/__init__.py", f"open({str(project.folder / 'ran')!r}, 'w')\n")
    project.write("shop/tasks.py", "raise SystemExit\n" + TASKS)
    # When
    project.migrate()
    # Then
    assert not (project.folder / "ran").exists()
    assert project.report.counts["declarations", "changed"] == 4


def test_links_and_environments_are_left_out(project: Project, tmp_path_factory: Any) -> None:
    # Given
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "tasks.py"
    elsewhere.write_text(TASKS)
    (project.folder / "linked.py").symlink_to(elsewhere)
    project.write("env311/pyvenv.cfg", "")
    project.write("env311/lib/tasks.py", TASKS)
    # When
    report = project.migrate()
    # Then
    assert report.file_count == 3
    assert elsewhere.read_text() == TASKS


def test_files_are_left_out_by_a_pattern(project: Project) -> None:
    project.write("legacy/old.py", "print 'two'\n")
    migration = Migration([project.folder], ["legacy/*"])
    assert migration.report.unreadable == {}


def test_a_file_keeps_its_encoding_and_its_line_ends(project: Project) -> None:
    # Given
    path = project.folder / "shop/tasks.py"
    path.write_bytes(
        "# coding: latin-1\r\nfrom celery import shared_task\r\n\r\n"
        "@shared_task\r\ndef act():\r\n    return 'é'\r\n".encode("latin-1")
    )
    # When
    project.migrate()
    # Then
    assert path.read_bytes() == (
        "# coding: latin-1\r\nfrom kjo_django import job\r\n\r\n"
        "@job\r\ndef act():\r\n    return 'é'\r\n"
    ).encode("latin-1")


def test_a_path_that_is_not_there_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="no file or folder") as raised:
        call_command("kjo_migrate_celery", str(tmp_path / "nowhere"))
    assert raised.value.returncode == 2


# --- What the rewritten declarations do -----------------------------------------------------------


@pytest.mark.django_db
def test_a_job_that_retries_by_itself_alone_is_tried_again_for_nothing_else() -> None:
    """``retry_on=(Retry,)``, as tasks are given that called ``self.retry``."""
    with registry.isolated():
        # Given
        @job(max_attempts=3, retry_on=(Retry,))
        def act(kind: str) -> None:
            raise Retry(delay=0) if kind == "retry" else OSError("gone")

        # When
        act.enqueue(kind="retry")
        act.enqueue(kind="error")
        drained = drain(with_retries=True, raise_errors=False)
        # Then
        attempts = dict(Job.objects.values_list("error", "attempts"))
    assert (drained.retried, drained.failed) == (2, 2)
    assert sorted(attempts.values()) == [1, 3]


def test_without_the_extra_the_command_says_which_one() -> None:
    # When
    program = (
        "import django; django.setup(); from django.core.management import call_command;"
        "call_command('kjo_migrate_celery', '.')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "KJO_TEST_WITHOUT": "migrate",
        },
    )
    # Then
    assert "pip install 'kjo-django[migrate]'" in done.stderr


# --- What is not surely the same ------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern",
    ["send", "[*send]", "{'a': 1, **send}", "Mail(to=send)", "str() as send", "1 | (2 as send)"],
)
def test_a_name_that_a_match_binds_is_no_task(pattern: str, called: Rewrite) -> None:
    code = f"match order:\n    case {pattern}:\n        send.delay(7)"
    assert called(code) == code


def test_a_match_may_change_what_an_enqueue_is_given_at_the_commit(called: Rewrite) -> None:
    code = called(
        """
        transaction.on_commit(lambda: send.delay(number))
        match order:
            case [number]:
                pass
        """,
        "from django.db import transaction",
    )
    assert "transaction.on_commit(lambda: send.enqueue(order_id=number))" in code


@pytest.mark.parametrize(
    "head", ["while m.call_args_list:", "match m.call_args_list:\n        case [call]:"]
)
def test_what_a_mock_has_noted_is_named_where_a_block_reads_it(head: str, project: Project) -> None:
    # Given
    project.write(
        "shop/tests.py",
        "from unittest.mock import patch\n\n\n"
        '@patch("shop.tasks.send.delay")\n'
        f"def test_it(m):\n    {head}\n            pass\n",
    )
    # When
    project.migrate()
    # Then
    assert any("arguments may be read by place" in each for each in project.reasons)


def test_a_schedule_whose_queue_is_no_text_is_left(project: Project) -> None:
    """KJO["QUEUES"] has to name it."""
    # Given
    path = project.write(
        "bazaar/settings.py",
        """
        NIGHT = "night"
        CELERY_BEAT_SCHEDULE = {
            "a": {"task": "shop.tasks.send", "schedule": 60, "options": {"queue": NIGHT}},
        }
        """,
    )
    # When
    project.migrate()
    # Then
    given: dict[str, Any] = {}
    exec(path.read_text(), given)
    assert "SCHEDULES" not in given["KJO"]
    assert "CELERY_BEAT_SCHEDULE" in given
    assert any("its queue is no text" in each for each in project.reasons)


@pytest.mark.parametrize("comment", ["# noqa: E501", "# type: ignore[misc]", "# at night"])
def test_the_comment_behind_a_rewritten_statement_stays(comment: str, called: Rewrite) -> None:
    code = "send.apply_async((7,), queue='a')"
    assert called(f"{code}  {comment}") == f"send.using(queue='a').enqueue(order_id=7)  {comment}"


def test_the_noqa_of_an_import_that_goes_is_not_named(called: Rewrite, project: Project) -> None:
    called("send.delay(7)", "from celery import shared_task  # noqa: F401")
    assert not any("noqa" in each for each in project.reasons)


def test_the_comments_of_settings_that_are_moved_stay_or_are_named(project: Project) -> None:
    # Given
    path = project.write(
        "bazaar/settings.py",
        """
        # Nightly work
        CELERY_BEAT_SCHEDULE = {  # see the wiki
            # before the shop opens
            "a": {"task": "shop.tasks.send", "schedule": 60},  # noqa: X1
        }
        """,
    )
    # When
    project.migrate()
    # Then
    code = path.read_text()
    for comment in ("# Nightly work", "# see the wiki", "# before the shop opens", "# noqa: X1"):
        assert comment in code or any(each.startswith(comment) for each in project.reasons)


def test_a_signature_of_a_periodic_task_is_left_with_it(called: Rewrite, project: Project) -> None:
    """Celery cannot run a step."""
    code = "order.add_periodic_task(3600, send.s(7), name='hourly')"
    assert called(code) == code
    assert [each for each in project.reasons if "periodic" in each] == [
        f"{code}: periodic tasks are declared"
    ]


@pytest.mark.parametrize(
    ("decorator", "is_left"),
    [
        ("retried", True),
        ("retried(3)", True),
        ("transaction.atomic", False),
        ("functools.cache", False),
    ],
)
def test_a_decorator_of_a_bound_function_is_given_a_context(
    decorator: str, is_left: bool, declared: Rewrite, project: Project
) -> None:
    """It may call self.retry()."""
    imports = "import functools\nfrom django.db import transaction\nfrom shop.again import retried"
    code = declared(f"{imports}\n\n@shared_task(bind=True)\n@{decorator}\ndef act(self): ...\n")
    assert ("@shared_task" in code) == is_left
    assert any("below it is given" in each for each in project.reasons) == is_left


def test_the_decorator_of_a_function_that_is_not_bound_may_be_any(declared: Rewrite) -> None:
    assert declared("@shared_task\n@retried\ndef act(): ...").startswith("@job\n@retried")


@pytest.mark.parametrize(
    ("setting", "here", "why"),
    [
        ("CELERY_TASK_EAGER_PROPAGATES=True", "", "are not run by the call"),
        ("CELERY_TASK_ALWAYS_EAGER=True", "@immediate()", "raises the errors of handlers"),
        (
            "CELERY_TASK_ALWAYS_EAGER=True, CELERY_TASK_EAGER_PROPAGATES=True",
            "@immediate()",
            "",
        ),
    ],
)
def test_what_a_test_says_of_tasks_at_once(
    setting: str, here: str, why: str, project: Project
) -> None:
    # Given
    path = project.write(
        "shop/tests.py",
        "from django.test import override_settings\n\n\n"
        f"@override_settings({setting})\ndef test_it():\n    pass\n",
    )
    # When
    project.migrate()
    # Then
    assert (here or f"@override_settings({setting})") in path.read_text()
    found = [each.why for each in project.report.findings if each.file.endswith("tests.py")]
    assert [why in each for each in found] == ([True] if why else [])
