"""Fixtures of every test."""

pytest_plugins = ["tests.services.fixtures"]
