"""Events between services: one service publishes an event, other services handle it once."""
