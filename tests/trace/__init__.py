"""How much of the app's own code one job walks through."""
