"""Event topics of their own for each test, and what was declared for them forgotten after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kjo_django import conf, registry
from kjo_django.patterns.events import handlers
from tests.declarations import forgetting


@pytest.fixture(autouse=True)
def _forget_declarations() -> Iterator[None]:
    with forgetting(conf._declared, registry._routes, handlers._routes):
        yield
