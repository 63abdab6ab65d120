"""The transport through the project's own database."""

from kjo_django.transports.database.transport import DatabaseTransport

__all__ = ["DatabaseTransport"]
