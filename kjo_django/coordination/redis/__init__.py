"""Coordination through Redis or Valkey."""

from kjo_django.coordination.redis.coordination import RedisCoordination

__all__ = ["RedisCoordination"]
