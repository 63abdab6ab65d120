"""Events between services: one service publishes what happened, others act on it, each once."""
