"""Options of pytest for the long run."""

from __future__ import annotations

import pytest

MINUTES, SEED = "--cluster-minutes", "--cluster-seed"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cluster", "the cluster of tests/cluster (-m cluster)")
    group.addoption(MINUTES, type=float, default=10.0, help="how long faults begin (10)")
    group.addoption(SEED, type=int, help="of a run to repeat; by default another one each time")
