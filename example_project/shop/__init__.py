"""The shop: orders, the jobs that work them off, and what these write."""
