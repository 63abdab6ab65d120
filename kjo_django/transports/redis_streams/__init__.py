"""The transport through Redis Streams."""

from kjo_django.transports.redis_streams.transport import RedisStreamsTransport

__all__ = ["RedisStreamsTransport"]
