"""An example project: a small shop whose orders are worked off by background jobs."""
