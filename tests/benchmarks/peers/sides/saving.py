"""What sides share whose jobs are timed: each job tells how long after its enqueue it ran.

``save`` answers each line on stdin, a number of jobs and their rate (0: no pause), with the
seconds that enqueueing them took. Delays go to the file ``TIMES``.
"""

import functools
import json
import os
import sys
import time


def ran(saved_at):
    """Tell that a job runs that was saved at this moment of the monotonic clock."""
    os.write(_times(), f"{time.monotonic() - saved_at} {time.monotonic()}\n".encode())


@functools.cache
def _times():
    return os.open(os.environ["TIMES"], os.O_WRONLY | os.O_APPEND)


def save(enqueue):
    """Enqueue what stdin asks for, by a function that is given the moment before its call."""
    for line in sys.stdin:
        count, rate = json.loads(line)
        start = time.monotonic()
        for number in range(count):
            if rate:
                time.sleep(max(0.0, start + number / rate - time.monotonic()))
            enqueue(time.monotonic())
        _answer(start)


async def save_async(enqueue):
    """The same by a coroutine function."""
    import asyncio

    for line in sys.stdin:
        count, rate = json.loads(line)
        start = time.monotonic()
        for number in range(count):
            if rate:
                await asyncio.sleep(max(0.0, start + number / rate - time.monotonic()))
            await enqueue(time.monotonic())
        _answer(start)


def _answer(start):
    print(json.dumps(time.monotonic() - start), flush=True)
