"""The interfaces of the systems this one unites, each on the same engine."""
