"""Django settings of the processes: those of every benchmark, and a queue for a second relay."""

import os
from datetime import timedelta

from tests.benchmarks.settings import *  # noqa: F403
from tests.benchmarks.settings import KJO, TOPIC

KJO["QUEUES"]["second"] = {"topic": f"{TOPIC}-second", "consumer_group": f"{TOPIC}-second"}
# A worker adds partitions to a topic that has fewer.
KJO["TOPIC_OPTIONS"]["partitions"] = int(os.environ["KJO_SCALE_PARTITIONS"])
# How many jobs share a transaction depends on how long handlers take, so on the worker's share of a
# processor. A bound that is reached first makes it the same at each share.
KJO["GROUP_SIZE"] = int(os.environ["KJO_SCALE_GROUP"])
KJO["GROUP_BUDGET"] = timedelta(seconds=10)
