"""Background jobs for Django."""
