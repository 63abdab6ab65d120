"""Events between services: one tells what happened, others act on it, each once (seed 5)."""
