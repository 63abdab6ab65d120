"""Servers somebody else runs: used, never started, stopped or restarted."""

from dataclasses import dataclass

from tests.services.databases import create_database, drop_database


@dataclass(frozen=True)
class GivenServer:
    """The server an environment variable names."""

    url: str

    @property
    def bootstrap_servers(self) -> str:
        """The same, under the name a `KafkaServer` has for it."""
        return self.url

    def createdb(self, name: str, template: str = "") -> str:
        return create_database(self.url, name, template)

    def dropdb(self, name: str) -> None:
        drop_database(self.url, name)
