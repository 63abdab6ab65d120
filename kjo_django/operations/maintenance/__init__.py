"""What keeps an installation in order: topics, pruning, and the rescue of lost messages."""
