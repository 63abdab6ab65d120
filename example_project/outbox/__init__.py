"""An email outbox: a table with a state of its own, polled by a producer, sent by a consumer."""
