"""procrastinate on PostgreSQL."""

import asyncio
import multiprocessing
import os
import sys

import procrastinate
from tally import tally

app = procrastinate.App(
    connector=procrastinate.PsycopgConnector(conninfo=os.environ["DATABASE_URL"])
)


@app.task(name="no_op")
async def no_op():
    tally.add()


def fill(count):
    store = procrastinate.App(
        connector=procrastinate.SyncPsycopgConnector(conninfo=os.environ["DATABASE_URL"])
    )
    with store.open():
        store.schema_manager.apply_schema()
        defer = store.configure_task("no_op", allow_unknown=True).batch_defer
        for start in range(0, count, 1000):
            defer(*[{} for _ in range(min(1000, count - start))])


async def work():
    async with app.open_async():
        await app.run_worker_async(
            concurrency=int(os.environ.get("CONCURRENCY", "10")),
            delete_jobs=os.environ.get("DELETE_JOBS", "never"),
            fetch_job_polling_interval=0.1,
        )


def run():
    asyncio.run(work())


if __name__ == "__main__":
    if sys.argv[1] == "fill":
        fill(int(sys.argv[2]))
    else:
        for _ in range(int(os.environ.get("PROCESSES", "2"))):
            multiprocessing.get_context("spawn").Process(target=run).start()
