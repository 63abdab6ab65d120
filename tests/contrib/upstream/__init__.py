"""The framework's own tests, run against our backends; see ``__main__``."""
