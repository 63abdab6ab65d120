"""Databases as the acceptance tests have them."""

from tests.acceptance.conftest import (  # noqa: F401 - fixtures
    database_url,
    postgres_template,
    sqlite_template,
)
