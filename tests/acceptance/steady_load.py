"""A web application of one release: it enqueues until SIGTERM, and prints what was promised.

python -m tests.acceptance.steady_load NAME RATE

Copied beside the code of an older release, it runs that.
"""

from __future__ import annotations

import signal
import sys
import threading

import django

from tests.acceptance.manage import die_with_parent

PROMISED = "promised "


def main() -> None:
    die_with_parent()
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    django.setup()
    from django.db import DatabaseError, InterfaceError, connections

    from kjo_django.exceptions import KjoError
    from tests.ledger import jobs

    prefix, rate, number = sys.argv[1], float(sys.argv[2]), 0
    while not stopping.is_set():
        name = f"{prefix}-{number}"
        kind, arguments = [
            (jobs.write, {}),
            (jobs.write_keyed, {"key": f"key-{number // 5 % 3}"}),
            (jobs.write_attempt, {"fail_times": 1}),
            (jobs.write_slowly, {"milliseconds": 50}),
            (jobs.write_async, {}),
        ][number % 5]
        try:
            kind.using(id=name, max_attempts=100).enqueue(job=name, **arguments)
        except (DatabaseError, InterfaceError, KjoError) as error:
            print(f"{name} is tried again: {error}", flush=True)
            connections.close_all()
        else:
            print(f"{PROMISED}{name}", flush=True)
            number += 1
        stopping.wait(1 / rate)


if __name__ == "__main__":
    main()
