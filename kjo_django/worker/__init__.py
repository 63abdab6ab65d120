"""A worker process: boot, heartbeats, drain, stop."""

from kjo_django.worker.process import Worker

__all__ = ["Worker"]
