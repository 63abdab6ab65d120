"""Coordination through the project's own database."""

from kjo_django.coordination.database.coordination import DatabaseCoordination

__all__ = ["DatabaseCoordination"]
