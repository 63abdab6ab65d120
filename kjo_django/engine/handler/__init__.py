"""One call of one handler, and everything that surrounds it."""
