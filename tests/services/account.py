"""Whom servers run as that refuse to run as root."""

import os
import pwd

from tests.services.errors import ServerFailed


def unprivileged(server: str) -> tuple[int, int] | None:
    """User and group id of `postgres` or, failing that, `nobody`; None where we are not root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            account = pwd.getpwnam(name)
        except KeyError:
            continue
        return account.pw_uid, account.pw_gid
    raise ServerFailed(f"{server} refuses to run as root, and there is no user to run it as")
