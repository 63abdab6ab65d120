"""What running handlers say and are asked: by the heartbeat, for all of them at once."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from django.utils.translation import gettext_lazy

from kjo_django.engine.handler import running
from kjo_django.engine.handler.context import JobContext
from kjo_django.engine.handler.running import ABORT_TTL, abort_name, look_after
from kjo_django.engine.handler.timeouts import RunningCall, TimeoutWatch
from kjo_django.enqueue.job_status import Progress, progress_name, progress_of
from kjo_django.runtime import current_runtime, get_coordination
from tests.unit.deliveries import Named

pytestmark = pytest.mark.django_db


@pytest.fixture
def jobs(monkeypatch):
    """Two handlers that run for a while already."""
    monkeypatch.setattr(running, "SETTLED_AFTER", -60.0)
    found = TimeoutWatch()
    contexts = [
        JobContext(name, 1, 1, name, "q", lease=f"CONS:Q:{name}", is_atomic=False)
        for name in ("talks", "cancelled")
    ]
    get_coordination().claim([context.lease for context in contexts], "me", ABORT_TTL)
    for context in contexts:
        RunningCall(found, context, None).__enter__()
        context.delivery = Named(context.lease)  # type: ignore[assignment]
    return found, *contexts


@pytest.mark.parametrize(
    ("percent", "text", "told"),
    [
        (Decimal("12.5"), "x", Progress(12.5, "x")),
        (Fraction(1, 4), "", Progress(0.25, "")),
        (1, "caf\udce9.txt", Progress(1, "caf?.txt")),
        (1, gettext_lazy("half"), Progress(1, "half")),
        (None, None, Progress(None, "None")),
        (None, 7, Progress(None, "7")),
    ],
    ids=repr,
)
def test_odd_words_of_one_keep_no_other_from_being_cancelled(jobs, percent, text, told):
    """A Decimal, or a file's name in no UTF-8, was an error of the whole worker's heartbeat."""
    # Given
    every, talking, cancelled = jobs
    get_coordination().set_marks({abort_name("cancelled"): "1"}, ABORT_TTL)
    # When
    talking.progress(percent, text)
    look_after(every, current_runtime(), "me")
    # Then
    assert cancelled.aborted and not talking.aborted
    assert progress_of(["talks"]) == {"talks": told}
    assert len(get_coordination().get_marks([progress_name("talks")])) == 1
