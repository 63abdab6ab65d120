"""The interview service."""
