"""A thousand calls, each by its own connection, of a server that cannot take them at once."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.acceptance.conftest import SELDOM_ON_MARIADB
from tests.acceptance.engine import Engine
from tests.ledger import jobs

pytestmark = pytest.mark.timeout(240)
CALLS = 1000


def outcomes_of_calls(engine: Engine) -> Counter[str]:
    """Let a worker with the whole backlog before it make all calls; return how jobs ended."""
    server = engine.run("tests.acceptance.slow_server")
    port = int(engine.wait_until(lambda: server.log, "The server never listened"))
    jobs.call_server.enqueue_many({"job": f"call {n}", "port": port} for n in range(CALLS))
    engine.worker()
    engine.settle()
    return Counter(engine.jobs.values_list("state", flat=True))


@SELDOM_ON_MARIADB
def test_a_thousand_naive_calls_of_a_slow_server_all_complete(engine: Engine) -> None:
    assert outcomes_of_calls(engine) == {"completed": CALLS}


@pytest.mark.long
def test_without_the_ramp_some_of_them_fail(embedded: Engine) -> None:
    """What the test above shows, it shows of the ramp."""
    embedded.configure(ASYNC_RAMP_UP=1_000_000)
    assert outcomes_of_calls(embedded)["failed"] > 0
