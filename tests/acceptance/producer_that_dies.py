"""A template producer killed between its claim and its send: what it claimed stays claimed.

python -m tests.acceptance.producer_that_dies
"""

import os
import signal

import django

from tests.acceptance.manage import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    django.setup()
    from kjo_django.patterns.items.producer import Sending
    from tests.items.producers import ItemProducer

    def die(self: object, records: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    Sending._publish_all = die  # type: ignore[method-assign, assignment]
    producer = ItemProducer({"claim_ttl": float(os.environ["KJO_TEST_CLAIM_TTL"])})
    producer.produce_messages({"state": 1}, 1000)
