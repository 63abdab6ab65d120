"""Event topics of their own for each test, and what was declared for them forgotten after it."""

from tests.events.conftest import _forget_declarations

__all__ = ["_forget_declarations"]
