"""The tests' settings on the memory transport."""

from tests.settings import *  # noqa: F403

KJO = {
    "SERVICE_NAME": "trace",
    "TRANSPORTS": {"default": {"BACKEND": "kjo_django.transports.memory.MemoryTransport"}},
}
