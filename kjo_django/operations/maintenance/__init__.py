"""Maintenance of an installation: topics, pruning, and the rescue of lost messages."""
