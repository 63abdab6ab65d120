"""Many workers in one process, each a member of the group and an owner of leases of its own.

python -m tests.acceptance.many_workers QUEUE COUNT
"""

import signal
import sys
import threading

import django

from tests.acceptance.manage import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    django.setup()
    from kjo_django.worker import Worker

    queue, count = sys.argv[1], int(sys.argv[2])
    workers = [Worker([queue], relay=False, concurrency=1) for _ in range(count)]
    threads = [threading.Thread(target=worker.run) for worker in workers]
    signal.signal(signal.SIGTERM, lambda *_: [worker.stop() for worker in workers])
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
