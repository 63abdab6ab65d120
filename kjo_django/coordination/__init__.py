"""Leases, marks and wake-ups that may vanish without harm: the contract in `base`, one module per implementation."""
