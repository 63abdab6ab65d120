"""Template producers and consumers of items."""
