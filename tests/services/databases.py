"""Databases within a PostgreSQL server, ours or a given one. Needs psycopg."""

from urllib.parse import urlsplit, urlunsplit


def create_database(server_url: str, name: str) -> str:
    _execute(server_url, "CREATE DATABASE {}", name)
    return urlunsplit(urlsplit(server_url)._replace(path=f"/{name}"))


def drop_database(server_url: str, name: str) -> None:
    _execute(server_url, "DROP DATABASE IF EXISTS {} WITH (FORCE)", name)


def _execute(server_url: str, statement: str, name: str) -> None:
    import psycopg
    from psycopg import sql

    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(sql.SQL(statement).format(sql.Identifier(name)))
