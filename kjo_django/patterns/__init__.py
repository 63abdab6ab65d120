"""Five interfaces on one engine: items, streams, events, KDLQ and queues."""
