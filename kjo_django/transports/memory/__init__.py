"""The transport within one process."""

from kjo_django.transports.memory.transport import MemoryTransport

__all__ = ["MemoryTransport"]
