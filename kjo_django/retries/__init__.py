"""When and whether to try again. Pure: no clock, no database, no I/O."""

from kjo_django.retries.backoff import Backoff
from kjo_django.retries.classification import Verdict, classify
from kjo_django.retries.policy import Decision, RetryPolicy

__all__ = ["Backoff", "Decision", "RetryPolicy", "Verdict", "classify"]
