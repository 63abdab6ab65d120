"""How often a worker's process collects garbage, and when nobody does."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from kjo_django import garbage_collection

pytestmark = pytest.mark.medium


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before, was_enabled = gc.get_threshold(), gc.isenabled()
    gc.unfreeze()
    yield
    gc.freeze()  # as tests/conftest.py has done
    gc.set_threshold(*before)
    if was_enabled:
        gc.enable()


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_it_looks_seldom_at_what_is_new_and_not_at_what_was_there():
    gc.set_threshold(700, 10, 10)
    with garbage_collection.seldom():
        assert gc.get_threshold() == garbage_collection.THRESHOLDS
        assert gc.get_freeze_count() > 1000
    assert gc.get_threshold() == (700, 10, 10)
    assert gc.get_freeze_count() == 0


def test_what_was_set_apart_before_stays_so():
    gc.set_threshold(700, 10, 10)
    garbage_collection.set_apart()
    before = gc.get_freeze_count()
    with garbage_collection.seldom():
        pass
    # Some of what was set apart may have been freed meanwhile.
    assert gc.get_freeze_count() > 0.9 * before > 1000


def test_garbage_that_handlers_make_is_freed_all_the_same():
    gc.set_threshold(700, 10, 10)
    with garbage_collection.seldom():
        gone = weakref.ref(Node())
        # Not asked within the loop: it would hold the object while Python 3.12 collects.
        kept = [[] for _ in range(2 * garbage_collection.THRESHOLDS[0])]
    assert gone() is None
    assert kept


@pytest.mark.parametrize("own", [(50_000, 20, 20), (0, 0, 0)])
def test_a_projects_own_pace_is_kept(own):
    gc.set_threshold(*own)
    with garbage_collection.seldom():
        assert gc.get_threshold() == own
        assert gc.get_freeze_count() == 0


def test_switched_off_it_stays_off():
    gc.disable()
    with garbage_collection.seldom():
        assert (gc.isenabled(), gc.get_freeze_count()) == (False, 0)


def test_what_is_raised_within_leaves_all_as_it_was():
    gc.set_threshold(700, 10, 10)
    with pytest.raises(ZeroDivisionError), garbage_collection.seldom():
        raise ZeroDivisionError
    assert (gc.get_threshold(), gc.get_freeze_count()) == ((700, 10, 10), 0)


def test_paused_it_looks_at_nothing_and_goes_on_afterwards():
    gc.enable()
    with garbage_collection.paused():
        assert not gc.isenabled()
        with garbage_collection.paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_is_raised_in_a_pause_ends_it():
    gc.enable()
    with pytest.raises(ZeroDivisionError), garbage_collection.paused():
        raise ZeroDivisionError
    assert gc.isenabled()


def test_a_pause_does_not_switch_on_what_was_off():
    gc.disable()
    with garbage_collection.paused():
        pass
    assert not gc.isenabled()
