"""Event topics of their own for each test, and what was declared for them forgotten after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kjo_django import registry


@pytest.fixture(autouse=True)
def _forget_declarations() -> Iterator[None]:
    with registry.isolated():
        yield
