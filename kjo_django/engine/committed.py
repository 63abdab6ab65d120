"""What a handler has committed by ending the transaction of its group."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

from kjo_django.engine import admission
from kjo_django.engine.attempt import Attempt, Ending
from kjo_django.engine.handler.call import call_watched
from kjo_django.engine.handler.connections import TransactionGuard
from kjo_django.runtime import Runtime

Ask = Callable[[Callable[[], Any]], Any]
"""Returns what a function that asks the database returns, waiting where the database is away."""


def keep_committed(
    runtime: Runtime, guard: TransactionGuard, guilty: Collection[Attempt], ask: Ask
) -> Sequence[Attempt] | None:
    """Return the attempts that had run before the guilty ones in a transaction that these have
    committed. Their endings hold, and only their rows are to be written; the others are to run
    again. None where nothing was committed: then all are.

    The markers tell: they were in the transaction. Their moment tells them from those of another
    worker that has taken a job over meanwhile. Those of attempts that have not completed are
    deleted here. What the completed ones have registered with ``on_commit`` is called.

    :param guilty: attempts whose call has ended the transaction, or may have.
    """
    for attempt in guard.attempts:
        attempt.is_in_doubt = attempt.is_acknowledged = False
        if attempt.delivery.attempt is attempt:
            attempt.delivery.attempt = None
    marked = {attempt.key: attempt.delivery for attempt in guard.attempts if attempt.is_marked}
    ours = ask(partial(runtime.store.known_markers, marked.keys(), guard.marked_at))
    if not ours:
        return None
    ran = list(takewhile(lambda attempt: attempt not in guilty, guard.ran))
    # What another worker has taken over is its own: it is admitted anew, and found to have ended.
    ran = [attempt for attempt in ran if attempt.key in ours or not attempt.is_marked]
    completed = [attempt for attempt in ran if attempt.ending is Ending.COMPLETED]
    left = ours - {attempt.key for attempt in completed}
    ask(partial(admission.delete_markers_ahead, runtime, [marked[key] for key in left]))
    for attempt in completed:
        attempt.is_committed = True
        attempt.delivery.attempt = attempt
    for call in guard.callbacks_before(guilty):
        call_watched(call, f"An on_commit callback failed: {call!r}", {})
    return ran
