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

from kjo_django import registry
from kjo_django.engine.attempt import Delivery, Departed
from kjo_django.engine.group import HELD_ELSEWHERE_DELAY
from kjo_django.engine.poller import Poller
from kjo_django.runtime import jobs_database
from kjo_django.store.servers import mend_connection
from kjo_django.worker import Worker
from tests.faults.boundary import Boundary, Died, within

logger = logging.getLogger(__name__)
MOST_TURNS = 25
"""Turns in which a scenario's worker is idle at last."""


class Process:
    """:param queues: what its worker consumes.
    :param ticks: whether its worker stores the jobs of schedules.
    """

    def __init__(
        self,
        name: str,
        queues: Sequence[str],
        boundary: Boundary | None = None,
        *,
        lanes: int = 1,
        ticks: bool = False,
    ) -> None:
        self.name = name
        self.boundary = boundary or Boundary()
        self.refusals: list[Exception] = []
        self.is_stopped = self.is_buried = False
        self.is_strict = False
        """Whether nothing befalls it, so that no step of its worker may fail."""
        with self.unwatched():
            self.worker = Worker(
                queues, concurrency=lanes, name=name, owns_process=False, schedules=ticks
            )
            self.worker.ensure_topics()
            self.worker.leases.show_alive()
            for poller in self.worker.pollers:
                poller._subscribe()

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

    def turn(self, *, beats: bool = True, relays: bool = True) -> bool:
        """Return whether anything was done.

        :param beats: whether it gives its sign of life.
        :param relays: whether its relay looks at what is due.
        """
        steps: list[Callable[[], bool]] = [self._beat] if beats else []
        steps += [self._tick] if self.worker.ticker is not None else []
        steps += [self._relay] if relays else []
        steps += [
            lambda poller=poller: self._poll(poller)  # type: ignore[misc]
            for poller in self.worker.pollers
        ]
        steps += [self._lanes, self._advance_lines]
        done = [self._step(step) for step in steps]  # each has its turn
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
            mend_connection(jobs_database())

    # --- What its threads do ----------------------------------------------------------------------

    def _beat(self) -> bool:
        self.worker.leases.show_alive()
        self.worker.leases.renew()
        if registry.limited and self.worker.limiter.releaser.has_waiting():
            self.worker.limiter.releaser.look_after()
        return False

    def _tick(self) -> bool:
        ticker = self.worker.ticker
        assert ticker is not None
        before = ticker.stored_count
        ticker.step()
        return ticker.stored_count > before

    def _relay(self) -> bool:
        relay = self.worker._relay
        before, relay._failed_until = relay.published_count, 0.0  # no pause in real time
        relay.step()
        assert relay._failing_since is None, "The relay could not work"
        return relay.published_count > before

    def _poll(self, poller: Poller) -> bool:
        before, poller._retry_at = poller.polled_count, 0.0  # no pause in real time
        poller.step()
        assert poller._subscription is not None, "The poller starts over"
        return poller.polled_count > before

    def _lanes(self) -> bool:
        worker, has_run = self.worker, False
        while (group := worker.scheduler.take(0.0)) is not None:
            has_run = True
            deferred: Sequence[Delivery] = group.deliveries
            flying = Departed()
            try:
                deferred = worker._pipeline.run(group.deliveries, flying)
            except BaseException as error:
                self._check()
                if self.is_strict:
                    raise
                logger.info("A lane failed: %r", error)
            finally:
                worker.scheduler.finish(group, deferred, HELD_ELSEWHERE_DELAY, departed=flying)
            while not worker.scheduler.wait_for(None, 0.02):  # coroutines
                self._check()
            self._check()
        return has_run

    def _advance_lines(self) -> bool:
        """Release what waits for limits, as others start and end."""
        if registry.limited:
            self.worker.limiter.releaser.step()
        return False

    # --- Its end ----------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return not self.worker.scheduler.outstanding

    def stop(self) -> None:
        """End as a worker does that is asked to: hand back what has not begun, say goodbye."""

        def leave() -> bool:
            self.worker._relay.close()
            for poller in self.worker.pollers:
                poller.unsubscribe()
            self.worker._direct_steps.close()
            return False

        def release_all() -> bool:
            self.worker.leases.release_all()
            return False

        self.worker.scheduler.stop()
        self._step(leave)
        self._step(release_all)
        self.is_stopped = True
        self._end_threads()

    def bury(self) -> None:
        """Let the world see that it died: sessions end, nobody gives a sign of life any more. To be
        called by the thread it died in, once or several times."""
        if self.is_buried:
            return
        self.is_buried = True
        self.boundary.die()
        self.crash()
        del connections[jobs_database()]

    def crash(self) -> None:
        """Vanish from the transport's groups."""
        for poller in self.worker.pollers:
            subscription: Any = poller._subscription
            if hasattr(subscription, "crash"):
                subscription.crash()
        self._end_threads()

    def close(self) -> None:
        if self.boundary.is_dead or self.is_stopped:
            return
        with self.unwatched():
            for poller in self.worker.pollers:
                poller.unsubscribe()
        self._end_threads()

    def _end_threads(self) -> None:
        self.worker._pipeline.close(1.0)
        self.worker._watch.stop()
