"""How handlers are run: in a transaction, under a lease, on an event loop, in batches."""
