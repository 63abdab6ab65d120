"""What the suite is to those who run it against a transport of their own."""

from __future__ import annotations

from pathlib import Path

import kjo_django

pytest_plugins = ["pytester"]

TRANSPORT = """
from kjo_django.testing.conformance import TransportConformance
from kjo_django.transports.memory import MemoryTransport

class Forgetful(MemoryTransport):
    def publish(self, records):
        return super().publish(records[:-1])

class TestForgetful(TransportConformance):
    within = 0.5

    def make_transport(self):
        return Forgetful("test", {})
"""


def test_what_fails_shows_what_was_found(pytester, monkeypatch):
    # Given a transport that answers one record less than it was given
    pytester.makepyfile(TRANSPORT)
    pytester.makeconftest("from django.conf import settings; settings.configure()")
    monkeypatch.setenv("PYTHONPATH", str(Path(kjo_django.__file__).parents[1]))
    # When
    result = pytester.runpytest_subprocess(
        "-p", "no:randomly", "-p", "no:django", "-k", "has_an_outcome"
    )
    # Then
    result.stdout.fnmatch_lines(["E *assert *None, None, *== *"])
