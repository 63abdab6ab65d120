"""Topics that vanish under running workers.

In the large tier: the worker looks again after a minute.
"""

from __future__ import annotations

import pytest
from confluent_kafka.admin import AdminClient

from tests.acceptance.engine import Engine
from tests.ledger import jobs
from tests.waiting import PATIENCE

pytestmark = [pytest.mark.timeout(300), pytest.mark.large]


@pytest.mark.promise("where-jobs-are")
def test_a_topic_that_is_deleted_under_a_worker_is_made_again(real: Engine) -> None:
    """FINDINGS 2.11: it was, by a restart only."""
    worker = real.ready_worker()
    jobs.write.enqueue(job="before")
    real.wait_until(lambda: real.entries.filter(job="before").exists(), "It did not run")
    # When
    assert real.servers.kafka is not None
    admin = AdminClient({"bootstrap.servers": real.servers.kafka})
    admin.delete_topics([real.topic])[real.topic].result(PATIENCE)
    jobs.write.enqueue(job="after")
    # Then
    real.wait_until(lambda: real.entries.filter(job="after").exists(), worker.log_tail())
    assert worker.stop() == 0, worker.log_tail()
    assert sorted(real.entries.values_list("job", flat=True)) == ["after", "before"]
