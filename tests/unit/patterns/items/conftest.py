"""Workers that are quick."""

from __future__ import annotations

import pytest


@pytest.fixture
def quick(settings, sqlite_file):
    settings.KJO = {
        "SERVICE_NAME": "tests",
        "BACKOFF_BASE": 0.05,
        "ERROR_RECOVERY_DELAYS": {"rate_limit": 0.4},
        "POLL_INTERVAL": 0.1,
        "HEARTBEAT_INTERVAL": 1.0,
        "MAX_ATTEMPTS": 3,
    }
