"""The suite every coordination backend passes; run it against your own.

    class TestMyCoordination(CoordinationConformance):
        def make_coordination(self):
            return MyCoordination({...})

Needs pytest, and no server of its own.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, ClassVar

import pytest

from kjo_django.coordination.base import Claim, Coordination, Listener, slot_name
from kjo_django.coordination.starts import Ask, Pace, Permit, Used

MINUTE = timedelta(minutes=1)


def pace(
    name: str,
    interval: float = 1.0,
    *,
    most: int = 1000,
    seconds: float = 3600.0,
    ahead: float = 0.0,
) -> Pace:
    """A rate; by default only its pace matters."""
    return Pace(name, most, seconds, interval, ahead)


def one(name: str, *, lasts: float = 0.0, **rule: Any) -> Ask:
    """An ask for one start of one rate."""
    return Ask([pace(name, **rule)], lasts)


class CoordinationConformance:
    """Subclass it and implement ``make_coordination``."""

    short: ClassVar[timedelta] = timedelta(milliseconds=300)
    """A lifetime to wait for; long enough for a few calls within it."""
    threads: ClassVar[int] = 10

    def make_coordination(self) -> Coordination:
        """Return a new instance. All instances of one test share their state."""
        raise NotImplementedError

    def end_thread(self) -> None:
        """Called at the end of each thread a test starts: close its connections."""

    @pytest.fixture
    def coordination(self) -> Iterator[Coordination]:
        coordination = self.make_coordination()
        yield coordination
        coordination.close()

    @pytest.fixture
    def name(self) -> str:
        """The name of a free lease."""
        return f"CONS:{uuid.uuid4().hex[:12]}:7"

    def outlive(self, lifetime: timedelta) -> None:
        time.sleep(lifetime.total_seconds() * 1.2 + 0.05)

    def in_threads(self, work: Callable[[int], None]) -> None:
        failures: list[BaseException] = []

        def run(number: int) -> None:
            try:
                work(number)
            except BaseException as error:  # a thread has nobody to raise it to
                failures.append(error)
            finally:
                self.end_thread()

        threads = [threading.Thread(target=run, args=(n,)) for n in range(self.threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert failures == [], failures

    # --- Leases -----------------------------------------------------------------------------------

    def test_a_free_name_is_claimed_once(self, coordination: Coordination, name: str) -> None:
        assert coordination.claim([name], "me", MINUTE) == [Claim(True, 1)]
        assert coordination.claim([name], "you", MINUTE) == [Claim(False, 1)]
        assert coordination.holders([name]) == {name: "me"}

    def test_many_names_are_answered_in_order(self, coordination: Coordination, name: str) -> None:
        names = [f"{name}:{number}" for number in range(1200)]
        coordination.claim(names[::2], "you", MINUTE)

        claims = coordination.claim(names, "me", MINUTE)

        assert [claim.acquired for claim in claims] == [False, True] * 600
        assert set(coordination.holders(names).values()) == {"me", "you"}
        assert coordination.renew(names, "me", MINUTE) == [False, True] * 600
        coordination.release(names, "me")
        assert set(coordination.holders(names)) == set(names[::2])

    def test_nothing_asked_is_nothing_answered(self, coordination: Coordination) -> None:
        assert coordination.claim([], "me", MINUTE) == []
        assert coordination.renew([], "me", MINUTE) == []
        coordination.release([], "me")
        assert coordination.holders([]) == {}
        coordination.set_marks({}, MINUTE)
        assert coordination.get_marks([]) == {}

    def test_of_many_threads_one_acquires(self, coordination: Coordination, name: str) -> None:
        """No gap between looking and taking."""
        for turn in range(5):
            acquired: list[int] = []
            barrier = threading.Barrier(self.threads)

            def claim(
                number: int,
                turn: int = turn,
                acquired: list[int] = acquired,
                barrier: threading.Barrier = barrier,
            ) -> None:
                barrier.wait()
                names = [f"{name}:{turn}", f"{name}:{turn}:{number}"]
                common, own = coordination.claim(names, f"token-{number}", MINUTE)
                assert own.acquired
                if common.acquired:
                    acquired.append(number)

            self.in_threads(claim)
            assert len(acquired) == 1
            assert coordination.holders([f"{name}:{turn}"]) == {
                f"{name}:{turn}": f"token-{acquired[0]}"
            }

    def test_claims_releases_and_claims_of_many_threads_exclude_each_other(
        self, coordination: Coordination, name: str
    ) -> None:
        inside: list[int] = []
        turns: list[int] = []

        def work(number: int) -> None:
            deadline = time.monotonic() + 30
            done = 0
            while done < 5 and time.monotonic() < deadline:
                if coordination.claim([name], f"token-{number}", MINUTE)[0].acquired:
                    inside.append(number)
                    assert inside == [number]
                    inside.remove(number)
                    coordination.release([name], f"token-{number}")
                    turns.append(number)
                    done += 1
                else:
                    time.sleep(0.002)

        self.in_threads(work)
        assert len(turns) == 5 * self.threads

    def test_the_same_token_acquires_again_without_a_delivery(
        self, coordination: Coordination, name: str
    ) -> None:
        coordination.claim([name], "me", self.short)
        assert coordination.claim([name], "me", MINUTE) == [Claim(True, 1)]
        self.outlive(self.short)
        assert coordination.holders([name]) == {name: "me"}, "the second claim did not extend it"

    def test_a_lease_expires(self, coordination: Coordination, name: str) -> None:
        """Nobody cleans up after a crash, and the crash counts."""
        coordination.claim([name], "dead", self.short)
        self.outlive(self.short)

        assert coordination.holders([name]) == {}
        assert coordination.renew([name], "dead", MINUTE) == [False]
        assert coordination.claim([name], "me", MINUTE) == [Claim(True, 2)]

    def test_renewing_extends(self, coordination: Coordination, name: str) -> None:
        coordination.claim([name], "me", self.short)
        assert coordination.renew([name], "me", MINUTE) == [True]
        self.outlive(self.short)
        assert coordination.claim([name], "you", MINUTE)[0].acquired is False

    def test_only_the_holder_renews(self, coordination: Coordination, name: str) -> None:
        coordination.claim([name], "me", self.short)
        assert coordination.renew([name, name + "?"], "you", MINUTE) == [False, False]
        self.outlive(self.short)
        assert coordination.claim([name], "you", MINUTE)[0].acquired

    def test_only_the_holder_releases(self, coordination: Coordination, name: str) -> None:
        """A late owner does not free its successor's lease."""
        coordination.claim([name], "late", self.short)
        self.outlive(self.short)
        coordination.claim([name], "successor", MINUTE)

        coordination.release([name], "late")

        assert coordination.holders([name]) == {name: "successor"}
        coordination.release([name], "successor", count_delivery=True)
        assert coordination.claim([name], "me", MINUTE) == [Claim(True, 3)], "counts were lost"

    def test_releasing_forgets_the_deliveries(self, coordination: Coordination, name: str) -> None:
        for _ in range(2):
            assert coordination.claim([name], "me", MINUTE) == [Claim(True, 1)]
            coordination.release([name], "me")
        assert coordination.holders([name]) == {}

    def test_releasing_may_keep_the_delivery(self, coordination: Coordination, name: str) -> None:
        for delivery in (1, 2, 3):
            assert coordination.claim([name], "me", MINUTE) == [Claim(True, delivery)]
            coordination.release([name], "me", count_delivery=True)
            assert coordination.holders([name]) == {}

    def test_releasing_may_undo_the_claim(self, coordination: Coordination, name: str) -> None:
        """What was claimed and not begun is counted as before."""
        coordination.claim([name], "dead", MINUTE)
        coordination.release([name], "dead", count_delivery=True)
        for _ in range(3):
            assert coordination.claim([name], "me", MINUTE) == [Claim(True, 2)]
            coordination.release([name], "me", undo_claim=True)
            assert coordination.holders([name]) == {}
        coordination.release([name], "me", undo_claim=True)  # nobody's: nothing to undo
        assert coordination.claim([name], "me", MINUTE) == [Claim(True, 2)]
        first = f"{name}:first"
        for _ in range(2):
            assert coordination.claim([first], "me", MINUTE) == [Claim(True, 1)]
            coordination.release([first], "me", undo_claim=True)

    def test_names_are_found_by_their_literal_beginning(
        self, coordination: Coordination, name: str
    ) -> None:
        """No glob, no LIKE wildcard, no other case."""
        base = f"CONS:{uuid.uuid4().hex[:8]}"
        wanted = [f"{base}:a*[b]?_%\\:{number}" for number in range(3)]
        others = [f"{base}:aXXb:1", f"{base}:A*[B]?_%\\:1", f"{base}:a*[b]?x%\\:1", f"{base}:a"]
        coordination.claim(wanted + others, "me", MINUTE)
        coordination.claim([f"{wanted[0]}:gone"], "me", MINUTE)
        coordination.release([f"{wanted[0]}:gone"], "me")

        assert sorted(coordination.names(f"{base}:a*[b]?_%\\")) == wanted
        assert sorted(coordination.names(base)) == sorted(wanted + others)
        assert list(coordination.names(f"{base}:nothing")) == []

    def test_names_of_ended_leases_are_gone(self, coordination: Coordination, name: str) -> None:
        coordination.claim([name], "me", self.short)
        self.outlive(self.short)
        assert list(coordination.names(name)) == []

    def test_long_names_and_other_scripts_are_names(
        self, coordination: Coordination, name: str
    ) -> None:
        names = [name + "x" * 400 + "1", name + "x" * 400 + "2", name + "заказ ☃ '\""]
        assert coordination.claim(names, "me", MINUTE) == [Claim(True, 1)] * 3
        assert coordination.holders(names) == dict.fromkeys(names, "me")
        coordination.release(names[:1], "me")
        assert set(coordination.holders(names)) == set(names[1:])

    # --- Limits -----------------------------------------------------------------------------------

    @pytest.fixture
    def limiting(self, coordination: Coordination) -> Coordination:
        if not coordination.supports_limits:
            pytest.skip("It has no limits")
        return coordination

    def test_permits_of_an_even_pace_are_its_interval_apart(
        self, limiting: Coordination, name: str
    ) -> None:
        first, second = limiting.permit([one(name, interval=1000.0)] * 2)

        assert first.wait == 0
        assert second.wait == pytest.approx(1000, abs=50)
        assert first.stamp
        assert not second.stamp

    def test_what_was_late_is_caught_up(self, limiting: Coordination, name: str) -> None:
        answers = limiting.permit([one(name, interval=1000.0, ahead=2000.0)] * 5)

        assert [answer.wait for answer in answers[:3]] == [0, 0, 0]
        assert [answer.wait for answer in answers[3:]] == pytest.approx([1000, 2000], abs=50)

    def test_a_window_has_no_more_permits_than_its_number(
        self, limiting: Coordination, name: str
    ) -> None:
        asks = [one(name, most=4, seconds=3000.0, interval=100.0, ahead=6000.0)] * 6
        waits = [answer.wait for answer in limiting.permit(asks)]

        assert waits[:4] == [0, 0, 0, 0]
        # The first is forgotten up to a part of the window too late.
        assert waits[4:] == pytest.approx([3015, 3015], abs=50)

    def test_a_window_moves_on(self, limiting: Coordination, name: str) -> None:
        seconds = self.short.total_seconds()
        ask = one(name, most=2, seconds=seconds, interval=0.001, ahead=1.0)
        assert [bool(answer.stamp) for answer in limiting.permit([ask] * 3)] == [True, True, False]
        self.outlive(self.short)
        assert [bool(answer.stamp) for answer in limiting.permit([ask] * 3)] == [True, True, False]

    def test_a_start_counts_as_late_as_it_may_come(self, limiting: Coordination, name: str) -> None:
        ask = one(name, most=1, seconds=3000.0, interval=0.001, lasts=2000.0)
        first, second = limiting.permit([ask] * 2)

        assert first.stamp
        assert second.wait == pytest.approx(5030, abs=50)

    def test_a_start_that_may_come_long_after_its_window_counts_until_then(
        self, limiting: Coordination, name: str
    ) -> None:
        """Where coordination is slow, permits last longer than a short window."""
        ask = one(name, most=1, seconds=1.0, interval=0.001, lasts=12.0)
        (first,), (second,) = limiting.permit([ask]), limiting.permit([ask])

        assert first.stamp
        assert not second.stamp
        assert second.wait == pytest.approx(13, abs=1)

    def test_a_permit_that_was_not_used_is_replaced_without_a_wait(
        self, limiting: Coordination, name: str
    ) -> None:
        ask = one(name, most=1, seconds=3000.0, interval=1000.0)
        (first,) = limiting.permit([ask])
        (again,) = limiting.permit([ask._replace(replaces=first.stamp, lasts=500.0)])

        assert again.wait == 0
        # It counts once, from its new moment on.
        (other,) = limiting.permit([ask._replace(replaces=first.stamp)])
        assert other.wait == pytest.approx(3530, abs=50)

    def test_a_permit_is_given_for_a_moment_ahead(self, limiting: Coordination, name: str) -> None:
        """Its start counts from then on, so that whoever prepares it is ready in time."""
        ask = one(name, interval=1000.0)._replace(within=1500.0)
        first, second, third = limiting.permit([ask] * 3)

        assert [first.wait, second.wait, third.wait] == pytest.approx([0, 1000, 2000], abs=50)
        assert first.stamp < second.stamp
        assert not third.stamp
        assert limiting.permit([ask])[0].wait == pytest.approx(2000, abs=50)

    def test_a_permit_is_given_half_a_window_ahead_at_most(
        self, limiting: Coordination, name: str
    ) -> None:
        """One that is replaced later must not meet others that counted on its end."""
        ask = one(name, seconds=3000.0, interval=1600.0)._replace(within=6000.0)

        assert not limiting.permit([ask] * 2)[1].stamp

    def test_a_start_counts_when_it_came(self, limiting: Coordination, name: str) -> None:
        ask = one(name, most=1, seconds=3000.0, interval=0.001, lasts=2000.0)
        (given,) = limiting.permit([ask])
        (other,) = limiting.permit([ask], None, [Used(ask.paces, given.stamp, 500.0)])

        assert other.wait == pytest.approx(2530, abs=50)

    def test_a_start_that_never_came_counts_no_longer(
        self, limiting: Coordination, name: str
    ) -> None:
        ask = one(name, most=1, seconds=3000.0, interval=2000.0)
        (given,) = limiting.permit([ask])
        unused = Used(ask.paces, given.stamp, None)

        assert limiting.permit([ask], None, [unused, unused])[0].stamp
        assert limiting.permit([ask])[0].wait == pytest.approx(3030, abs=50)

    def test_an_ask_of_several_rates_waits_for_the_slowest(
        self, limiting: Coordination, name: str
    ) -> None:
        fast, slow = pace(f"{name}:fast", 100.0), pace(f"{name}:slow", 1000.0)
        limiting.permit([Ask([slow], 0.0)])

        both, alone = limiting.permit([Ask([fast, slow], 0.0), Ask([fast], 0.0)])

        assert both.wait == pytest.approx(1000, abs=50)
        # Nothing was taken of the fast one.
        assert alone.wait == 0
        both = limiting.permit([Ask([slow, pace(f"{name}:third", 2000.0)], 0.0)])[0]
        assert both.wait == pytest.approx(1000, abs=50)

    def test_rates_of_different_names_are_independent(
        self, limiting: Coordination, name: str
    ) -> None:
        asks = [one(f"{name}:{number}", interval=1000.0) for number in range(300)]

        assert [answer.wait for answer in limiting.permit(asks)] == [0] * 300
        assert min(answer.wait for answer in limiting.permit(asks)) > 500

    def test_a_faster_rate_does_not_wait_for_the_slower_one_before(
        self, limiting: Coordination, name: str
    ) -> None:
        limiting.permit([one(name, most=2, seconds=3600.0, interval=3600.0)])

        assert limiting.permit([one(name, most=2, seconds=1.0, interval=0.5)])[0].wait <= 0.5

    def test_many_threads_share_a_rate(self, limiting: Coordination, name: str) -> None:
        given: list[Permit] = []

        def ask(number: int) -> None:
            ask = one(name, most=3, seconds=60.0, interval=0.001, ahead=1.0)
            given.extend(answer for answer in limiting.permit([ask]) if answer.stamp)

        self.in_threads(ask)
        assert len(given) == 3

    def test_slots_are_given_until_there_is_none(self, limiting: Coordination, name: str) -> None:
        slots = limiting.claim_slots([(name, 3)] * 5, "me", MINUTE)

        assert slots == [slot_name(name, 1), slot_name(name, 2), slot_name(name, 3), "", ""]
        assert limiting.claim_slots([(name, 3)], "me", MINUTE) == [""]
        assert limiting.claim_slots([(name, 3)], "you", MINUTE) == [""]
        assert limiting.holders(slots[:3]) == dict.fromkeys(slots[:3], "me")

    def test_a_slot_is_a_lease(self, limiting: Coordination, name: str) -> None:
        first, second = limiting.claim_slots([(name, 2)] * 2, "me", MINUTE)

        assert limiting.renew([first], "me", MINUTE) == [True]
        limiting.release([second], "you")
        assert limiting.claim_slots([(name, 2)], "you", MINUTE) == [""]
        limiting.release([second], "me", undo_claim=True)
        assert limiting.claim_slots([(name, 2)], "you", MINUTE) == [second]

    def test_a_slot_is_free_when_it_has_expired(self, limiting: Coordination, name: str) -> None:
        (slot,) = limiting.claim_slots([(name, 1)], "me", self.short)
        self.outlive(self.short)

        assert limiting.claim_slots([(name, 1)], "you", MINUTE) == [slot]
        assert limiting.renew([slot], "me", MINUTE) == [False]

    def test_slots_of_several_names_in_one_call(self, limiting: Coordination, name: str) -> None:
        one, other = f"{name}:a", f"{name}:b"

        slots = limiting.claim_slots([(one, 1), (other, 2), (one, 1), (other, 2)], "me", MINUTE)

        assert slots == [slot_name(one, 1), slot_name(other, 1), "", slot_name(other, 2)]

    def test_of_many_threads_no_more_than_the_slots_get_one(
        self, limiting: Coordination, name: str
    ) -> None:
        taken: list[str] = []

        def claim(number: int) -> None:
            taken.extend(filter(None, limiting.claim_slots([(name, 3)], "worker", MINUTE)))

        self.in_threads(claim)
        assert sorted(taken) == [slot_name(name, number) for number in (1, 2, 3)]

    def test_nothing_limited_asked_is_nothing_answered(self, limiting: Coordination) -> None:
        assert limiting.permit([]) == []
        assert limiting.claim_slots([], "me", MINUTE) == []

    def test_a_known_sign_is_no_hindrance(self, limiting: Coordination, name: str) -> None:
        limiting.claim([f"WORKER:{name}"], "me", MINUTE)
        sign = (f"WORKER:{name}", "me")

        assert limiting.permit([one(name)], sign)[0].wait == 0
        assert limiting.claim_slots([(name, 1)], "me", MINUTE, sign) == [slot_name(name, 1)]

    # --- Marks ------------------------------------------------------------------------------------

    def test_marks_are_kept_and_replaced(self, coordination: Coordination, name: str) -> None:
        """Changed content is sent again and its hash overwritten."""
        first, second = f"PREFIX_SENT:{name}:1", f"PREFIX_SENT:{name}:2"
        coordination.set_marks({first: "a" * 64, second: "b"}, MINUTE)
        coordination.set_marks({first: "c"}, MINUTE)

        assert coordination.get_marks([second, first, "nobody"]) == {first: "c", second: "b"}

    def test_marks_expire(self, coordination: Coordination, name: str) -> None:
        coordination.set_marks({f"{name}:1": "old", f"{name}:2": "old"}, self.short)
        coordination.set_marks({f"{name}:2": "new"}, MINUTE)
        self.outlive(self.short)
        assert coordination.get_marks([f"{name}:1", f"{name}:2"]) == {f"{name}:2": "new"}

    def test_many_marks_at_once(self, coordination: Coordination, name: str) -> None:
        marks = {f"PREFIX_SENT:{name}:{number}": str(number) for number in range(1500)}
        coordination.set_marks(marks, MINUTE)
        assert coordination.get_marks(list(marks)) == marks

    def test_marks_of_many_threads(self, coordination: Coordination, name: str) -> None:
        names = [f"PREFIX_SENT:{name}:{number}" for number in range(20)]

        def mark(number: int) -> None:
            for _ in range(5):
                order = names if number % 2 else names[::-1]
                coordination.set_marks(dict.fromkeys(order, str(number)), MINUTE)

        self.in_threads(mark)
        assert set(coordination.get_marks(names)) == set(names)

    # --- Wake-up calls ----------------------------------------------------------------------------

    def call_until(self, listener: Listener, channel: str, heard: set[str]) -> None:
        """Wait for a call that was made just before."""
        deadline = time.monotonic() + 5
        called: set[str] = set()
        while not called and time.monotonic() < deadline:
            called = listener.wait(1)
        assert called == heard

    def test_a_listener_hears_its_channels(self, coordination: Coordination, name: str) -> None:
        listener = coordination.listen([f"{name}:a", f"{name}:b"])
        try:
            coordination.notify(f"{name}:other")
            coordination.notify(f"{name}:b")
            self.call_until(listener, f"{name}:b", {f"{name}:b"})
            assert listener.wait(0.05) == set()
            coordination.notify(f"{name}:a")
            self.call_until(listener, f"{name}:a", {f"{name}:a"})
        finally:
            listener.close()

    def test_one_call_wakes_listeners_of_several_channels(
        self, coordination: Coordination, name: str
    ) -> None:
        listeners = [coordination.listen([f"{name}:{each}"]) for each in "ab"]
        try:
            coordination.notify(f"{name}:a", f"{name}:b", f"{name}:c")
            for listener, each in zip(listeners, "ab", strict=True):
                assert listener.wait(5) == {f"{name}:{each}"}
        finally:
            for listener in listeners:
                listener.close()

    def test_a_call_ends_a_wait_early(self, coordination: Coordination, name: str) -> None:
        listener = coordination.listen([name])

        def call() -> None:
            coordination.notify(name)
            self.end_thread()

        timer = threading.Timer(0.2, call)
        started = time.monotonic()
        timer.start()
        try:
            assert listener.wait(15) == {name}
            assert time.monotonic() - started < 5
        finally:
            timer.join()
            listener.close()

    def test_a_wait_without_a_call_ends_in_time(
        self, coordination: Coordination, name: str
    ) -> None:
        listener = coordination.listen([name])
        started = time.monotonic()
        assert listener.wait(0.3) == set()
        assert 0.25 <= time.monotonic() - started < 2
        listener.close()

    def test_wake_ends_a_wait(self, coordination: Coordination, name: str) -> None:
        listener = coordination.listen([name])
        timer = threading.Timer(0.2, listener.wake)
        started = time.monotonic()
        timer.start()
        assert listener.wait(15) == set()
        assert time.monotonic() - started < 3
        timer.join()
        listener.close()
        listener.close()

    def test_calls_and_wakes_end_a_wait_at_once(
        self, coordination: Coordination, name: str
    ) -> None:
        """A listener that looks now and then would add the time between two looks to every job."""
        listener, event = coordination.listen([name]), threading.Event()
        listener.wait(0.2)

        def delay(end_the_wait: Callable[[], None], wait: Callable[[], object]) -> float:
            ended: list[float] = []

            def end() -> None:
                ended.append(time.monotonic())
                end_the_wait()
                self.end_thread()

            timer = threading.Timer(0.03, end)
            timer.start()
            wait()
            woke = time.monotonic()
            timer.join()
            return woke - ended[0]

        def hear(*heard: str) -> None:
            assert listener.wait(15) == {*heard}

        def await_event() -> None:
            assert event.wait(15)
            event.clear()

        called, woken, plain = list[float](), list[float](), list[float]()
        for _ in range(9):
            called.append(delay(lambda: coordination.notify(name), lambda: hear(name)))
            woken.append(delay(listener.wake, hear))
            plain.append(delay(event.set, await_event))
        # The quickest ones: others have to do with how busy the machine is. So has how late a
        # thread is that waits for nothing but an event.
        late = 10 * sorted(plain)[2]
        assert sorted(called)[2] < 0.05 + late, (called, plain)
        assert sorted(woken)[2] < 0.02 + late, (woken, plain)
        listener.close()

    def test_a_wake_before_the_wait_is_not_lost(
        self, coordination: Coordination, name: str
    ) -> None:
        listener = coordination.listen([name])
        listener.wake()
        started = time.monotonic()
        assert listener.wait(15) == set()
        assert time.monotonic() - started < 3
        listener.close()

    def test_notifying_nobody_is_fine(self, coordination: Coordination, name: str) -> None:
        coordination.notify(name)

    def test_other_instances_share_leases_marks_and_calls(
        self, coordination: Coordination, name: str
    ) -> None:
        other = self.make_coordination()
        listener = other.listen([name])
        coordination.claim([name], "me", MINUTE)
        coordination.set_marks({f"PREFIX_SENT:{name}": "x"}, MINUTE)
        coordination.notify(name)

        assert other.claim([name], "you", MINUTE)[0].acquired is False
        assert other.get_marks([f"PREFIX_SENT:{name}"]) == {f"PREFIX_SENT:{name}": "x"}
        self.call_until(listener, name, {name})
        listener.close()
        other.close()

    def test_a_reachable_backend_answers_a_probe(self, coordination: Coordination) -> None:
        assert coordination.probe(10.0)
