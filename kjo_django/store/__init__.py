"""The statements of the hot path."""
