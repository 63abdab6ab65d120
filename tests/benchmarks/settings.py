"""Django settings of a measured process: what a project would have, on a topic of its own."""

import os

from tests.settings import *  # noqa: F403
from tests.settings import INSTALLED_APPS as _INSTALLED
from tests.settings import KJO as _TESTED

TOPIC = os.environ["KJO_BENCHMARK_TOPIC"]

INSTALLED_APPS = [*_INSTALLED, "tests.benchmarks"]

# All that is not named here has its default: lanes, group sizes and intervals are what users get.
KJO = {
    "SERVICE_NAME": "benchmarks",
    # drain.async compares coroutines that run together with a loop that starts them all at once.
    "ASYNC_RAMP_UP": 1_000_000,
    "QUEUES": {"ledger": {"topic": TOPIC, "consumer_group": f"{TOPIC}-group"}},
    "TOPIC_OPTIONS": {"partitions": 4, "replication_factor": 1},
}
if "TRANSPORTS" in _TESTED:
    KJO["TRANSPORTS"] = {
        "default": {
            "BACKEND": _TESTED["TRANSPORTS"]["default"]["BACKEND"],
            "OPTIONS": {"bootstrap.servers": os.environ["KAFKA_BOOTSTRAP_SERVERS"]},
        }
    }
if "COORDINATION" in _TESTED:
    KJO["COORDINATION"] = {
        "BACKEND": _TESTED["COORDINATION"]["BACKEND"],
        # A given Redis may serve others too.
        "OPTIONS": {"CACHE": "default", "KEY_PREFIX": f"{TOPIC}:"},
    }
