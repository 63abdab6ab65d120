"""Template producers and consumers of tasks on a stream."""
