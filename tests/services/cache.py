"""Where what tests have fetched or built is kept."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """`KJO_TEST_CACHE`, else `kjo-django` in the user's cache."""
    if chosen := os.environ.get("KJO_TEST_CACHE"):
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "kjo-django")
