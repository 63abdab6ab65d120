"""Which of the framework's tests apply to which backend of ours, and why the others do not."""

from __future__ import annotations

MODULES = {
    "kjo": ("test_tasks", "test_dummy_backend", "test_immediate_backend"),
    "tolerant": ("test_tasks", "test_dummy_backend", "test_immediate_backend"),
}
"""``test_custom_backend`` is left out: it defines backends of its own and examines none of ours."""

_WORKER = "a worker, not the caller, runs the task"
_COMMIT = "a task runs once the transaction that enqueued it has committed, never within it"
_RESULTS = "results can be had and refreshed from anywhere"
_LOOP = "it refreshes synchronously on the event loop, where Django allows no query"
_STORED = "it changes a result kept in memory; ours are rows"

NOT_APPLICABLE = {
    "kjo": {
        "TaskTestCase.test_refresh_result": _LOOP,
        "DummyBackendTestCase.test_refresh_result": _STORED,
        "DummyBackendTestCase.test_refresh_result_async": _STORED,
        "ImmediateBackendTestCase.test_throws_keyboard_interrupt": _WORKER,
        "ImmediateBackendTestCase.test_cannot_get_result": _RESULTS,
        "ImmediateBackendTestCase.test_cannot_refresh_result": _RESULTS,
        "ImmediateBackendTestCase.test_cannot_pass_run_after": "run_after is supported",
        "ImmediateBackendTransactionTestCase."
        "test_doesnt_wait_until_transaction_commit_by_default": _COMMIT,
    },
    "tolerant": {},
}
