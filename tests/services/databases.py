"""Databases within a PostgreSQL or MariaDB server, ours or a given one. Needs its driver."""

from urllib.parse import urlsplit, urlunsplit


def create_database(server_url: str, name: str, template: str = "") -> str:
    copied = f' TEMPLATE "{template}"' if template else ""
    _execute(server_url, f"CREATE DATABASE {{}}{copied}", name)
    return urlunsplit(urlsplit(server_url)._replace(path=f"/{name}"))


def drop_database(server_url: str, name: str) -> None:
    is_mysql = server_url.startswith("mysql")
    how = "" if is_mysql else " WITH (FORCE)"
    _execute(server_url, f"DROP DATABASE IF EXISTS {{}}{how}", name)


def _execute(server_url: str, statement: str, name: str) -> None:
    parts = urlsplit(server_url)
    if parts.scheme == "mysql":
        import pymysql

        where = {"host": parts.hostname, "port": parts.port, "password": parts.password or ""}
        with pymysql.connect(**where, user=parts.username) as connection:
            connection.cursor().execute(statement.format(name))
        return
    import psycopg
    from psycopg import sql

    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(sql.SQL(statement).format(sql.Identifier(name)))
