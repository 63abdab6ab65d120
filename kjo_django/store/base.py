"""The store: the statements of the hot path, by way of the ORM."""

from __future__ import annotations


class Store:
    """The reference implementation; other databases override what they do in fewer round trips.

    :param alias: of the database that holds the jobs.
    """

    def __init__(self, alias: str) -> None:
        self.alias = alias
