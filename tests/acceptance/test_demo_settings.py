"""Three variables move the example project to real servers, each independently of the others."""

import runpy
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from kjo_django.conf import Settings
from kjo_django.values import read_options

pytestmark = pytest.mark.medium  # quick, of a folder that is not

SETTINGS = Path(__file__).resolve().parents[2] / "example_project" / "settings.py"
VARIABLES = {
    "KAFKA_BOOTSTRAP_SERVERS": "localhost:9092",
    "REDIS_URL": "redis://localhost:6379/0",
    "DATABASE_URL": "postgresql://me:p%40ss@localhost:5433/shop?sslmode=disable",
}


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, "DJANGO_ALLOWED_HOSTS", "DJANGO_DEBUG", "DJANGO_SECRET_KEY"):
        monkeypatch.delenv(name, raising=False)


def settings() -> dict[str, Any]:
    """The settings a new process would have."""
    found = runpy.run_path(str(SETTINGS))
    assert read_options(Settings, found["KJO"], "KJO", upper=True)[1] == []
    return found


def test_with_nothing_in_the_environment_no_server_is_named() -> None:
    found = settings()

    assert found["DATABASES"]["default"]["ENGINE"] == "django.db.backends.sqlite3"
    assert "CACHES" not in found
    assert not {"TRANSPORTS", "COORDINATION"} & set(found["KJO"])
    assert found["DEBUG"] is True


@pytest.mark.promise("servers-by-settings")
@pytest.mark.parametrize("chosen", range(8))
def test_each_variable_moves_its_part_alone(monkeypatch: pytest.MonkeyPatch, chosen: int) -> None:
    kafka, redis, postgresql = (bool(chosen & bit) for bit in (1, 2, 4))
    for (name, value), is_set in zip(VARIABLES.items(), (kafka, redis, postgresql), strict=True):
        # An empty variable is as good as none.
        monkeypatch.setenv(name, value if is_set else "")

    found = settings()

    assert ("TRANSPORTS" in found["KJO"]) is kafka
    assert ("COORDINATION" in found["KJO"]) is ("CACHES" in found) is redis
    assert found["DATABASES"]["default"]["ENGINE"].endswith("postgresql") is postgresql


def test_a_database_url_is_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", VARIABLES["DATABASE_URL"])

    default = settings()["DATABASES"]["default"]

    assert (default["USER"], default["PASSWORD"], default["NAME"]) == ("me", "p@ss", "shop")
    assert (default["HOST"], default["PORT"]) == ("localhost", "5433")
    assert default["OPTIONS"] == {"sslmode": "disable"}


@pytest.mark.parametrize(
    "url", ["mysql://localhost/shop", "postgresql://localhost", "postgresql://localhost:p/shop"]
)
def test_another_database_url_is_refused(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("DATABASE_URL", url)

    with pytest.raises(ImproperlyConfigured, match="DATABASE_URL must look like"):
        settings()


def test_a_deployment_is_not_in_debug_and_has_no_secret_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DJANGO_ALLOWED_HOSTS", "shop.example.com,www.example.com")

    found = settings()

    assert found["ALLOWED_HOSTS"] == ["shop.example.com", "www.example.com"]
    assert (found["DEBUG"], found["SECRET_KEY"]) == (False, "")
