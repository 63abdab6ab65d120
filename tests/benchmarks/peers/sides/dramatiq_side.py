"""Dramatiq on Redis, without any middleware."""

import os
import sys
from pathlib import Path

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from tally import tally

broker = RedisBroker(
    url=os.environ["REDIS_URL"], namespace=os.environ["KJO_BENCHMARK_TOPIC"], middleware=[]
)
dramatiq.set_broker(broker)


@dramatiq.actor
def no_op():
    tally.add()


if __name__ == "__main__":
    if sys.argv[1] == "fill":
        for _ in range(int(sys.argv[2])):
            no_op.send()
    else:
        lanes = ["-p", os.environ.get("PROCESSES", "2"), "-t", os.environ.get("THREADS", "8")]
        here = ["--path", str(Path(__file__).resolve().parent), "--skip-logging"]
        program = [sys.executable, "-m", "dramatiq", "dramatiq_side", *lanes, *here]
        os.execv(sys.executable, program)
