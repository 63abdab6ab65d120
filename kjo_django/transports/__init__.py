"""Carrying records: the contract in `base`, one module per implementation."""
