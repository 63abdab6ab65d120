"""What ends a benchmark early."""


class BenchmarkError(Exception):
    """A measurement failed or gave a result that cannot be; the message says which and why."""
