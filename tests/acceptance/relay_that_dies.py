"""A relay that is killed when so many batches were published and before any of it was recorded."""

import os
import signal
import sys
import threading
from typing import Any

import django

from tests.acceptance.manage import die_with_parent


def wait_for_ever(*arguments: Any) -> set[Any]:
    threading.Event().wait()
    return set()


def main() -> None:
    die_with_parent()
    django.setup()
    from kjo_django.outbox.relay import Publications, Relay
    from kjo_django.store.postgres import PostgresStore

    batches, record = iter(range(int(sys.argv[1]), 0, -1)), Publications.begin

    def record_or_die(*arguments: Any) -> None:
        if next(batches) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        record(*arguments)

    Publications.begin = record_or_die  # type: ignore[method-assign]
    # What is recorded while the next batch is sent takes too long.
    PostgresStore.record_published = wait_for_ever
    Relay().run()


if __name__ == "__main__":
    main()
