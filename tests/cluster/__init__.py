"""Three brokers, a database with a standby, Redis with sentinels, workers and relays, each on a
machine of its own, and faults drawn from a seed.

    python -m tests.cluster --seed 7 --faults 10      # one run, printed as a table
    python -m pytest tests/cluster                    # what is quick
    python -m pytest tests/cluster -m cluster --cluster-minutes 30

`network` has the machines, `machines` the servers on them, `plan` the faults of a seed, `cluster`
what keeps the servers running, `faults` what is done to them, `web` the clients, `history` what was
promised and what became of it.
"""
