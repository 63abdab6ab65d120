"""Tags of our own templates."""
