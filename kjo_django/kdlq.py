"""The names of `kjo_django.patterns.kdlq` that projects import."""

from kjo_django.patterns.kdlq import *  # noqa: F403
from kjo_django.patterns.kdlq import __all__ as __all__
