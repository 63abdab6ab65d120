"""Huey on Redis, without results."""

import logging
import os
import sys

import redis
from huey import RedisHuey
from huey.consumer import Consumer
from tally import tally

huey = RedisHuey(
    os.environ["KJO_BENCHMARK_TOPIC"],
    results=False,
    connection_pool=redis.ConnectionPool.from_url(os.environ["REDIS_URL"]),
)


@huey.task()
def no_op():
    tally.add()


if __name__ == "__main__":
    if sys.argv[1] == "fill":
        for _ in range(int(sys.argv[2])):
            no_op()
    else:
        logging.disable(logging.WARNING)
        consumer = Consumer(
            huey,
            workers=int(os.environ.get("WORKERS", "2")),
            worker_type=os.environ.get("WORKER_TYPE", "process"),
            periodic=False,
            check_worker_health=False,
        )
        consumer.run()
