"""What can go wrong before a test has a server to talk to.

ServiceError
├── Unprovisionable   the machine lacks a server and it could not be installed (locally: a skip)
└── ServerFailed      an installed server did not start, or died (always a failure)
"""


class ServiceError(Exception):
    """Root of this package's errors; the message says what to do."""


class Unprovisionable(ServiceError):
    """A server is not installed here and cannot be: offline, not root, not Debian."""


class ServerFailed(ServiceError):
    """A server exited or did not answer in time; the message ends with the tail of its log."""
