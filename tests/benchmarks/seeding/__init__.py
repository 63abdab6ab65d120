"""What `tests.benchmarks.seed` writes."""
