"""Tracebacks begin where the project's own code does."""

from __future__ import annotations

from pathlib import Path

import pytest

import kjo_django
from kjo_django import job, registry
from kjo_django.admin.display import show_traceback, traceback_parts
from kjo_django.models import DeadLetter
from kjo_django.testing import drain
from tests.dashboard.conftest import url
from tests.factories import DeadLetterFactory

OURS = str(Path(kjo_django.__file__).parent)


def frame(path: str, name: str, line: str = "call()") -> str:
    return f'  File "{path}", line 7, in {name}\n    {line}\n    ~~~~^^\n'


HEAD = "Traceback (most recent call last):\n"
LEADING = (
    frame(f"{OURS}/engine/attempts.py", "attempt")
    + frame("/usr/lib/python3.13/contextlib.py", "inner")
    + frame("/venv/lib/python3.13/site-packages/django/db/transaction.py", "inner")
)
PROJECT = frame("/srv/kjo_django/shop/jobs.py", "send", "refuse(order)")


def folded(text: str) -> list[int]:
    return [count for _lines, count in traceback_parts(text) if count]


def shown(text: str) -> str:
    return "\n".join(line for lines, count in traceback_parts(text) if not count for line in lines)


def test_the_frames_before_the_projects_code_are_folded():
    text = HEAD + LEADING + PROJECT + "ValueError: no\n"
    assert folded(text) == [3]
    assert shown(text) == (HEAD + PROJECT + "ValueError: no")


def test_frames_of_ours_that_the_project_calls_stay():
    text = HEAD + LEADING + PROJECT + frame(f"{OURS}/enqueue/storing.py", "store") + "TypeError\n"
    assert folded(text) == [3]
    assert "storing.py" in shown(text)


def test_a_package_that_is_installed_is_the_projects_code():
    installed = frame("/venv/lib/python3.13/site-packages/shop/jobs.py", "send")
    assert folded(HEAD + LEADING + installed + "ValueError: no\n") == [3]


def test_each_exception_of_a_chain_is_folded_alone():
    again = "\nDuring handling of the above exception, another exception occurred:\n\n"
    one = HEAD + LEADING + PROJECT + "ValueError: no\n"
    assert folded(one + again + one) == [3, 3]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no traceback",
        HEAD,
        HEAD + "ValueError: no\n",
        HEAD + PROJECT + "ValueError: no\n",
        HEAD + LEADING + "TimeoutError: by kjo_django alone\n",
        "  + Exception Group Traceback (most recent call last):\n  |   File",
    ],
)
def test_what_has_nothing_to_fold_is_shown_as_it_is(text):
    assert folded(text) == []
    assert shown(text) == text.rstrip("\n")


def test_a_hostile_traceback_is_text():
    evil = "<script>alert(1)</script>"
    html = show_traceback(HEAD + frame(f"{OURS}/engine/{evil}", evil) + PROJECT + evil)
    assert "<script" not in html
    assert "<details" in html


@pytest.mark.django_db(transaction=True)
def test_a_real_failure_begins_with_the_handler(everybody):
    # Given
    @job(name="tests.refusing", max_attempts=1)
    def refusing() -> None:
        raise ValueError("refused")

    refusing.enqueue()
    drain(raise_errors=False)
    registry.unregister("tests.refusing")
    # When
    letter = DeadLetter.objects.get()
    # Then what is shown first is the handler
    assert OURS in letter.traceback
    assert shown(letter.traceback).splitlines()[1].endswith("in refusing")
    page = everybody.get(url("letter", letter.pk)).content.decode()
    assert 'class="kjo-frames"><summary>' in page
    job_page = everybody.get(url("job", letter.job_id)).content.decode()
    assert 'class="kjo-frames"><summary>' in job_page


@pytest.mark.django_db
def test_a_dead_letter_is_headed_by_its_handler_and_its_error(everybody, operator):
    letter = DeadLetterFactory(handler="shop.send", error_type="shop.Refused", error="by ada")
    address = url("letter", letter.pk)
    assert "<h1>shop.send: shop.Refused</h1>" in everybody.get(address).content.decode()
    blind = operator("view_dashboard", "view_deadletter").get(address).content.decode()
    assert "<h1>shop.send: shop.Refused</h1>" in blind
    letter = DeadLetterFactory(handler="", topic="emails", error_type="", reason="deserialization")
    page = everybody.get(url("letter", letter.pk)).content.decode()
    assert "<h1>emails: Unreadable</h1>" in page
