"""Other job queues on the same machine and servers, each with its best documented settings found.

Each lives in an environment of its own (`environments`), is described in `catalogue`, and speaks
through a small program in `sides/`, run by path with that environment's Python and never imported
here: ``fill N`` stores N jobs that do nothing, ``work`` is its worker. Each run of a job is counted
through `sides/tally.py`. Those of `TIMED_PEERS` are enqueued while their worker runs: ``install``
makes their tables, ``save`` enqueues as it is told, and `sides/saving.py` tells when each job ran.
"""
