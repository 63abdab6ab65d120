"""Leases, marks and wake-ups that may vanish: the contract in `base`, one module each."""
