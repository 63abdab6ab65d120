"""Oban for Python on PostgreSQL: one row for each job, handlers as coroutines."""

import asyncio
import os
import signal
import sys

import uvloop
from oban import Oban, worker
from oban.schema import install
from saving import ran, save_async

QUEUE = "default"
LIMIT = int(os.environ.get("LIMIT", "10"))


@worker(queue=QUEUE)
class Timed:
    async def process(self, job):
        ran(job.args["saved_at"])


async def make_tables():
    pool = await Oban.create_pool(os.environ["DATABASE_URL"])
    await install(pool)
    await pool.close()


async def work():
    pool = await Oban.create_pool(os.environ["DATABASE_URL"])
    is_over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, is_over.set)
    async with Oban(pool=pool, queues={QUEUE: LIMIT}):
        await is_over.wait()
    await pool.close()


async def save():
    pool = await Oban.create_pool(os.environ["DATABASE_URL"])
    Oban(pool=pool)
    await save_async(lambda moment: Timed.enqueue({"saved_at": moment}))
    await pool.close()


if __name__ == "__main__":
    # Workers are found again by the path of their module.
    import oban_side

    uvloop.run(
        {"install": make_tables, "work": oban_side.work, "save": oban_side.save}[sys.argv[1]]()
    )
