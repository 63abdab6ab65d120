"""The mixed load: jobs of every kind, faults and restarts drawn from a seed, against a model.

    plan         what is enqueued when, how each handler behaves, what happens to the processes
    application  the web process: enqueues what the plan says
    handlers     what workers run; each adds one entry to the ledger
    execution    starts, kills and freezes processes as the plan says, and waits for the end
    invariants   what must hold of the database, the trace and the topics afterwards

docs/how-to/contributing.md says how to run one seed again.
"""
