"""What running jobs in a test's own transaction leaves of it."""

from __future__ import annotations

import pytest
from django.db import connection, transaction

from kjo_django.testing import drain
from tests.ledger.jobs import no_op


@pytest.mark.django_db
def test_callbacks_of_the_tests_transaction_stay_as_they_are() -> None:
    # Given
    def callback() -> None:
        raise AssertionError("the test's transaction is not committed")

    transaction.on_commit(callback)
    no_op.enqueue_many([{}] * 30)
    # When: they would be wrapped once more for each job, and their texts grow twofold
    assert drain().completed == 30
    # Then
    assert connection.run_on_commit[0][1] is callback
