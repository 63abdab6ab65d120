"""How fast kjo_django is on this machine, beside what the machine could do.

    python -m tests.benchmarks                       # everything, a table
    python -m tests.benchmarks --json > result.json  # the same for programs
    python -m tests.benchmarks --scenario drain --engine real --jobs 50000 --repeat 5

Absolute figures say more about the machine and its load than about the code. So beside ours runs,
in the same round and on the same input, a loop somebody would write by hand for just this purpose
(`limits/`), and what counts is their ratio.

PJQ-67: throughput is measured, not promised.

Every measurement is a process of its own (`measure.py`) on a fresh database and a fresh topic.
"""
