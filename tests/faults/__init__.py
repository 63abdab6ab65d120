"""The fault matrix: each scenario, with each fault at each call it makes over a boundary."""
