"""``kjo_limits``."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator

import pytest
from django.core.management import CommandError, call_command

from kjo_django import job, registry
from kjo_django.limits.control import set_limit
from kjo_django.models import LimitControl

pytestmark = pytest.mark.django_db
NAME = "job:tests.limited"


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    @job(name="tests.limited", rate="5/s", concurrency=3)
    def limited() -> None:
        pass

    yield
    registry.unregister("tests.limited")


def run(*arguments: str) -> str:
    out = io.StringIO()
    call_command("kjo_limits", *arguments, stdout=out)
    return out.getvalue()


def test_listing() -> None:
    set_limit(NAME, rate="2/m", actor="anna")
    heading, line = run("list").splitlines()
    assert heading.split()[:6] == ["name", "rate", "burst", "concurrency", "taken", "waiting"]
    assert line.split()[:6] == [NAME, "2/m", "1", "3", "0", "0"]
    assert "rate 5/s, burst 1, concurrency 3" in line
    assert line.endswith("anna")
    (row,) = json.loads(run("list", NAME, "--json"))["limits"]
    assert (row["rate"], row["declared"]["rate"]) == ("2/m", "5/s")
    assert run("list", "queue:default") == "There are no limits.\n"


def test_setting_and_clearing() -> None:
    assert "Changed 1." in run("set", NAME, "--rate", "2/m", "--concurrency", "1")
    row = LimitControl.objects.get()
    assert (row.rate, row.burst, row.concurrency) == ("2/m", None, 1)
    assert row.changed_by == "kjo_limits"
    assert "Nothing was changed." in run("set", NAME, "--rate", "2/m")
    answer = json.loads(run("set", NAME, "--rate", "declared", "--burst", "4", "--json"))
    assert answer["changed"] == 1
    (limit,) = answer["limits"]
    assert (limit["rate"], limit["burst"], limit["concurrency"]) == ("5/s", 4, 1)
    assert "Changed 1." in run("clear", NAME)
    assert not LimitControl.objects.exists()
    assert "Nothing was changed." in run("clear", NAME)


def test_what_was_asked_of_a_job_that_is_gone_is_cleared() -> None:
    LimitControl.objects.create(name="job:tests.gone", rate="1/s")
    assert "job:tests.gone" in run("list")
    assert "Changed 1." in run("clear", "job:tests.gone")
    assert not LimitControl.objects.exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("set", "job:tests.limitd", "--rate", "1/s"), "No job is named 'tests.limitd'."),
        (("clear", "queue:nosuch"), "No queue is named 'nosuch'."),
        (("list", "nosuch"), "A limit is named queue:… or job:…, not 'nosuch'"),
        (("set", NAME, "--rate", "fast"), "rate must be"),
        (("set", NAME, "--burst", "0"), "burst"),
        (("set", "queue:default", "--concurrency", "2"), "concurrency must be of a job"),
        (("set", NAME), "set needs --rate, --burst or --concurrency"),
        (("set", "--rate", "1/s"), "set needs the name of a limit"),
        (("clear",), "clear needs the name of a limit"),
        (("clear", NAME, "--rate", "1/s"), "--rate: only set takes values, not clear"),
    ],
)
def test_what_means_nothing_is_refused(arguments: tuple[str, ...], text: str) -> None:
    with pytest.raises(CommandError, match=text) as caught:
        run(*arguments)
    if arguments[-1] != "0":  # which the parser refuses
        assert caught.value.returncode == 2
    assert not LimitControl.objects.exists()
