"""The transport through Redis Streams."""

try:
    from kjo_django.transports.redis_streams.transport import RedisStreamsTransport
except ModuleNotFoundError as error:
    raise ImportError(f"{error}: for Redis, pip install 'kjo-django[redis]'") from error

__all__ = ["RedisStreamsTransport"]
