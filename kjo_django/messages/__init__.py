"""What travels: serializers (bytes ↔ values), header names and the envelope. Pure; no I/O."""
