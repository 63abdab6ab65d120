"""A process of a service: what it enqueues, and its worker, step by step on one thread.

A turn of the worker is what its threads do: a sign of life, the relay, the pollers, the lanes; what
one of them meets ends that step as it ends a round of the thread, and the next turn tries again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from django.db import connections

from kjo_django.conf import get_settings
from kjo_django.engine.attempt import Delivery, Mode
from kjo_django.engine.group import HELD_ELSEWHERE_DELAY
from kjo_django.engine.poller import Poller
from kjo_django.outbox import relay
from kjo_django.store.transactions import jobs_database
from kjo_django.transports.base import Subscription
from kjo_django.worker import Worker
from tests.faults.boundary import Boundary, Died, within

logger = logging.getLogger(__name__)
MOST_TURNS = 25
"""Turns in which a scenario's worker is idle at last."""


class Process:
    """:param queues: what its worker consumes."""

    def __init__(self, name: str, queues: Sequence[str], boundary: Boundary | None = None) -> None:
        self.name = name
        self.boundary = boundary or Boundary()
        self.refusals: list[Exception] = []
        self.is_stopped = False
        self.is_strict = False
        """Whether nothing befalls it, so that no step of its worker may fail."""
        self._subscriptions: dict[Poller, Subscription] = {}
        with self.unwatched():
            self.worker = Worker(queues, concurrency=1, name=name, owns_process=False)
            self.worker.ensure_topics()
            self.worker.leases.show_alive()
            for poller in self.worker.pollers:
                self._subscribe(poller)

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Act as this process, with calls that are neither recorded nor struck."""
        was, self.boundary.is_open = self.boundary.is_open, False
        try:
            with within(self.boundary):
                yield
        finally:
            self.boundary.is_open = was

    def ask(self, function: Callable[[], Any]) -> Any:
        """Do what a request does; an error is the caller's answer. None: there was one."""
        try:
            with within(self.boundary):
                return function()
        except Exception as error:
            self.refusals.append(error)
            self._mend()
            return None
        finally:
            self._check()

    def work(self) -> None:
        """Let the worker take turns until it is idle."""
        for _ in range(MOST_TURNS):
            if not self.turn():
                return
        raise AssertionError(f"{self.name} is not idle after {MOST_TURNS} turns")

    def turn(self) -> bool:
        """Return whether anything was done."""
        steps: list[Callable[[], bool]] = [self._beat, self._relay]
        steps += [
            lambda poller=poller: self._poll(poller)  # type: ignore[misc]
            for poller in self.worker.pollers
        ]
        done = [self._step(step) for step in [*steps, self._lanes]]  # each has its turn
        return any(done)

    def _step(self, step: Callable[[], bool]) -> bool:
        try:
            with within(self.boundary):
                return step()
        except Exception as error:
            if self.is_strict:
                raise
            logger.info("A step failed: %r", error)
            self._mend()
            return True
        finally:
            self._check()

    def _check(self) -> None:
        if self.boundary.is_dead:
            raise Died

    def _mend(self) -> None:
        """What a thread does with its connection after an error."""
        with within(self.boundary):
            relay.drop_broken(jobs_database())

    # --- What its threads do ----------------------------------------------------------------------

    def _beat(self) -> bool:
        self.worker.leases.show_alive()
        self.worker.leases.renew()
        return False

    def _relay(self) -> bool:
        before = self.worker._relay.published_count
        self.worker._relay._round()
        return self.worker._relay.published_count > before

    def _subscribe(self, poller: Poller) -> Subscription:
        subscription = poller._transport.subscribe(
            poller.topics,
            poller.group,
            lease=get_settings().record_lease,
            on_revoked=poller._on_revoked,
            on_assigned=poller._on_assigned,
        )
        poller._subscription = self._subscriptions[poller] = subscription
        poller._paused, poller._skipped_keys = set(), set()
        return subscription

    def _poll(self, poller: Poller) -> bool:
        subscription = self._subscriptions.get(poller) or self._subscribe(poller)
        before = poller.polled_count
        try:
            poller._poll_once(subscription)
        except BaseException:
            if not self.boundary.is_dead:
                self._unsubscribe(poller)
            raise
        return poller.polled_count > before

    def _unsubscribe(self, poller: Poller) -> None:
        subscription = self._subscriptions.pop(poller)
        self.worker.lanes.discard(subscription.assignment(), subscription)
        subscription.close()

    def _lanes(self) -> bool:
        worker, has_run = self.worker, False
        while (group := worker.lanes.take(0.0)) is not None:
            has_run = True
            deferred: Sequence[Delivery] = group.deliveries
            flying: set[Delivery] = set()
            try:
                if group.mode is Mode.CONCURRENT:
                    deferred = worker._pipeline.launch(group.deliveries, flying)
                else:
                    deferred = worker._pipeline.run(group.deliveries, group.mode)
            except BaseException as error:
                self._check()
                if self.is_strict:
                    raise
                logger.info("A lane failed: %r", error)
            finally:
                worker.lanes.done(group, deferred, HELD_ELSEWHERE_DELAY, flying=flying)
            while not worker.lanes.wait_for(None, 0.02):  # coroutines
                self._check()
            self._check()
        return has_run

    # --- Its end ----------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return not self.worker.lanes.outstanding

    def stop(self) -> None:
        """End as a worker does that is asked to: hand back what has not begun, say goodbye."""

        def leave() -> bool:
            self.worker._relay.close()
            for poller in list(self._subscriptions):
                self._unsubscribe(poller)
            return False

        def say_goodbye() -> bool:
            self.worker.leases.say_goodbye()
            return False

        self.worker.lanes.stop()
        self._step(leave)
        self._step(say_goodbye)
        self.is_stopped = True
        self._end_threads()

    def bury(self) -> None:
        """Let the world see that it died: sessions end, nobody gives a sign of life any more."""
        self.boundary.die()
        for subscription in self._subscriptions.values():
            if hasattr(subscription, "crash"):
                subscription.crash()
        del connections[jobs_database()]
        self._end_threads()

    def close(self) -> None:
        if self.boundary.is_dead or self.is_stopped:
            return
        with self.unwatched():
            for poller in list(self._subscriptions):
                self._unsubscribe(poller)
        self._end_threads()

    def _end_threads(self) -> None:
        self.worker._pipeline.close(1.0)
        self.worker._watch.stop()
