"""Jobs a second against workers, partitions and relays, and what a million a second would need.

    python -m tests.benchmarks.scale --out docs/explanation/scale/scale.json   # measure, as root
    python -m tests.benchmarks.scale --plots       # tables and plots of docs/explanation/scale.md

Each process runs on a machine of its own, a network namespace as in `tests.cluster`, with a share
of a processor (`cpu.py`). `points.py` says what is measured, `measuring.py` measures it. `model.py`
takes the cost of a job from some of the points and predicts the others; `needs.py` works out from
these costs what a rate needs. Both are arithmetic without a server.
"""
