"""From committed rows to the transports: the due rows, the relay, and where each went."""
