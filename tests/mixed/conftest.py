"""Databases as the acceptance tests have them."""

from tests.acceptance.conftest import database_url  # noqa: F401 - a fixture
