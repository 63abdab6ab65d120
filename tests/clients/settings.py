"""A service with the handlers of this package."""

from tests.settings import *  # noqa: F403
from tests.settings import INSTALLED_APPS as APPS

INSTALLED_APPS = [*APPS, "tests.clients"]
