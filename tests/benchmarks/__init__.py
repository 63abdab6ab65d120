"""How fast kjo_django is on this machine, beside what the machine could do.

    python -m tests.benchmarks                       # a quick run of everything, a table
    python -m tests.benchmarks --json > result.json  # the same for programs
    python -m tests.benchmarks --scenario drain --engine real --jobs 50000 --rounds 5
    python -m tests.benchmarks --peers               # other job queues too
    python -m tests.benchmarks --plots               # the published page, from its raw results
    python -m tests.benchmarks.seed --help           # a table of ten million rows
    python -m tests.benchmarks.profile --help        # where the microseconds go

Absolute figures say more about the machine and its load than about the code. So beside ours runs,
in the same round and on the same input, a loop somebody would write by hand for just this purpose
(`limits/`), and what counts is their ratio.

PJQ-67: throughput is measured, not promised.

Every measurement is a process of its own (`measure.py`) on a fresh database and a fresh topic.
`published/` makes docs/explanation/performance.md from the raw results beside it.
"""
