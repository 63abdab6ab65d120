"""Workflows: jobs that wait for one another. What is here counts steps that have ended and releases
those that waited for them, in the transaction that records the end."""
