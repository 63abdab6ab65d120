"""The names of `kjo_django.patterns.queue` that projects import."""

from kjo_django.patterns.queue import *  # noqa: F403
from kjo_django.patterns.queue import __all__ as __all__
