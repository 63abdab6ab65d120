"""Several workers of Celery side by side, each as quiet as it can be."""

import os
import subprocess
import sys

QUIET = ["--loglevel", "WARNING", "--without-mingle", "--without-gossip", "--without-heartbeat"]


def work(app, side):
    """Be one worker, or start as many of this side as ``PROCESSES`` says and wait for them."""
    count = int(os.environ.get("PROCESSES", "1"))
    if count > 1:
        one = {**os.environ, "PROCESSES": "1"}
        workers = [
            subprocess.Popen([sys.executable, side, "work", str(n)], env=one) for n in range(count)
        ]
        for worker in workers:
            worker.wait()
        return
    lanes = ["--pool", os.environ.get("POOL", "prefork")]
    lanes += ["--concurrency", os.environ.get("CONCURRENCY", "4")]
    app.worker_main(["worker", *lanes, "--hostname", f"worker{sys.argv[-1]}@%h", *QUIET])
