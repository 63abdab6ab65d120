"""Monitoring: status, figures over time, health, and the checks of a deployment."""
