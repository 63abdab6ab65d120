"""The user service."""
