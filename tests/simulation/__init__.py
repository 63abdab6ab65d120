"""Any number of processes, step by step on one thread, in virtual time, in an order drawn from a
seed, with faults and deaths between any two steps; ``python -m tests.simulation --seed 7``.

The parts are those of ``tests.faults``: its boundary, clock, simulated processes and invariants.
"""
