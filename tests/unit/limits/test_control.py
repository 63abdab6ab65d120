"""What operators are shown of the limits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from kjo_django import job
from kjo_django.limits.control import overview

pytestmark = pytest.mark.django_db


def host_of(url: str) -> str:
    return url.partition("/")[0]


@pytest.mark.parametrize(
    ("key", "shown"), [("url", "url"), (host_of, "host_of"), (partial(host_of), ""), (None, "")]
)
def test_a_key_is_shown_as_the_name_of_its_argument_or_of_its_function(
    forgotten_definitions: None, key: str | Callable[[str], str] | None, shown: str
) -> None:
    @job(name="tests.keyed", rate="5/s", rate_key=key, concurrency=2, concurrency_key=key)
    def keyed(url: str) -> None:
        pass

    (found,) = [row for row in overview() if row["name"] == "job:tests.keyed"]
    assert (found["rate_key"], found["concurrency_key"]) == (shown, shown)
