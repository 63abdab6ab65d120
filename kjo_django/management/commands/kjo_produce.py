"""``kjo_produce``: the relay as a process of its own, or a template producer."""

from __future__ import annotations

import difflib
import json
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from django.core.exceptions import FieldError, ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser
from django.utils.module_loading import import_string
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from kjo_django import registry
from kjo_django.enqueue.definition import known_queue
from kjo_django.enqueue.storing import OUTGOING
from kjo_django.logs import get_logger
from kjo_django.management.commands._shared import (
    ParsedCommand,
    chosen_databases,
    command_errors,
    positive,
    seconds,
    using,
)
from kjo_django.operations.translations import grouped
from kjo_django.outbox.relay import Relay
from kjo_django.patterns.declared import declared_producers, path_of
from kjo_django.patterns.items.producer import AbstractProducer, ProduceResult, produce_every
from kjo_django.runtime import Runtime, current_runtime, runtime_for
from kjo_django.worker.duties import OUTAGES, ClockCheck, DutyThread
from kjo_django.worker.report import announce, surroundings
from kjo_django.worker.supervisor import THREAD_DIED

logger = get_logger("kjo_django")

LEFT_AFTER = 10.0
"""Seconds that the other relays have to end when one has died."""
STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


class Command(ParsedCommand):
    """Publish committed jobs until stopped, or run a template producer.

    Exit codes of a producer's run: 0 all sent, 1 something was not sent, 2 wrong usage. Of the
    relay: 0 stopped, 70 it has died.
    """

    writes_log = True
    without_database = "all of them if not given"
    help = (
        "Without a producer: run the relay, which publishes committed jobs to their transports. "
        "With one (app.producers.EmailProducer): send its items, once or every --interval seconds."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the options."""
        add = parser.add_argument
        add("names", nargs="*", help="Queues to relay, all if none is named; or one producer.")
        add("--once", action="store_true", help="Do what is due now, then exit.")
        add(
            "--criteria",
            nargs="+",
            default=[],
            help="""Which items: '{"state": 1}', or state=1 priority=high.""",
        )
        add("--limit", type=positive, default=100, help="Most items of one run.")
        add("--type", default="new", help="The messages' type.")
        add("--interval", type=seconds, help="Seconds from run to run; once if not given.")
        add("--json", action="store_true", help="One JSON object for each run; the relay's start.")

    def handle(self, *args: Any, **options: Any) -> None:
        """Run the producer named, or else the relay."""
        with command_errors():
            producer = self._producer(options["names"])
            if producer is not None:
                if options["once"] and options["interval"]:
                    raise ValueError(_("--once and --interval exclude each other."))
                self._produce(producer, read_criteria(options["criteria"]), options)
            elif options["criteria"] or options["interval"]:
                raise ValueError(_("--criteria and --interval go with a producer."))
            else:
                self._relay(options)

    def _producer(self, names: list[str]) -> AbstractProducer | None:
        """Return the producer named, None where queues are."""
        if len(names) != 1 or "." not in names[0] or names[0] in registry.queue_names():
            return None
        try:
            found = import_string(names[0])
        except ImportError as error:
            hint = producer_hint(names[0])
            text = _("%(path)r cannot be imported: %(error)s.") % {"path": names[0], "error": error}
            raise ValueError(f"{text} {hint}".rstrip()) from error
        if not (isinstance(found, type) and issubclass(found, AbstractProducer)):
            raise ValueError(_("%r is not an AbstractProducer.") % names[0])
        try:
            return found()
        except (ImproperlyConfigured, TypeError) as error:
            raise ValueError(str(error)) from error

    # --- The relay --------------------------------------------------------------------------------

    def _relay(self, options: dict[str, Any]) -> None:
        queues: list[str] = options["names"]
        for name in queues:
            _check_queue(name)
        last_error: list[str] = []

        def note(error: str | None) -> None:
            if error is not None:
                last_error[:] = [error]

        made = [
            Relay(queues or None, runtime=runtime_for(alias), on_error=note)
            for alias in chosen_databases(options)
        ]
        relays = [relay for relay in made if relay.queues]
        if not relays:
            self.stdout.write(
                _("Nothing to relay: these queues publish with the job's transaction.")
            )
            return
        if options["once"]:
            self._relay_once(relays)
            if last_error:
                raise CommandError(_("Not all of it was taken: %s") % last_error[0])
            return
        for number in STOP:
            signal.signal(number, lambda *_: _stop(relays))
        for relay in relays:
            self._announce(relay, as_json=options["json"])
        self.stdout.flush()
        have_all_stopped = _run(relays)
        count = _published(relays)
        text = ngettext("Stopped after %d messages.", "Stopped after %d messages.", count)
        self.stdout.write(text % count)
        if not have_all_stopped:
            sys.exit(THREAD_DIED)

    def _announce(self, relay: Relay, *, as_json: bool) -> None:
        """Say what a relay publishes."""
        what, runtime = _("Relaying %s") % ", ".join(relay.queues), relay.runtime
        used = {runtime.settings.queue(name).transport for name in relay.queues}
        facts = {"queues": relay.queues, **surroundings(runtime, used)}
        announce(self.stdout, what, facts, as_json=as_json)

    def _relay_once(self, relays: list[Relay]) -> None:
        left = []
        for relay in relays:
            ClockCheck(relay.runtime).work()
            with using(relay.runtime.database):
                left += relay.publish_all()
        self.stdout.write(_("Published %d.") % _published(relays))
        if left:
            text = _("Another relay publishes, and was left: %s.")
            self.stdout.write(text % ", ".join(left))

    # --- A producer -------------------------------------------------------------------------------

    def _produce(
        self, producer: AbstractProducer, criteria: dict[str, Any], options: dict[str, Any]
    ) -> None:
        limit, kind = options["limit"], options["type"]

        def show(result: ProduceResult) -> None:
            names = ("sent", "skipped", "failed", "total")
            text = _("%(sent)s sent, %(skipped)s skipped, %(failed)s failed of %(total)s")
            counts = text % {name: grouped(getattr(result, name)) for name in names}
            line = f"{type(producer).__name__} -> {producer.target.topic}: {counts}"
            if options["json"]:
                line = json.dumps(result.as_dict(), ensure_ascii=False)
            elif result.reason:
                line = f"{line} ({result.reason})"
            self.stdout.write(line)
            self.stdout.flush()

        try:
            if not options["interval"]:
                result = producer.produce_messages(criteria, limit, kind)
                show(result)
                if result.failed:
                    sys.exit(1)
                return
            stopping = threading.Event()
            for number in STOP:
                signal.signal(number, lambda *_: stopping.set())
            if not options["json"]:  # there each line is a run
                runtime, path, topic = current_runtime(), path_of(type(producer)), producer.target
                what = _("Sending items of %(producer)s to %(topic)s every %(seconds)g s") % {
                    "producer": path,
                    "topic": topic.topic,
                    "seconds": options["interval"],
                }
                announce(self.stdout, what, surroundings(runtime, {topic.transport}))
                self.stdout.flush()
            produce_every(
                options["interval"],
                producer,
                criteria,
                limit,
                kind,
                stopping=stopping,
                on_result=show,
                on_error=lambda error: self.stderr.write(f"{type(error).__name__}: {error}"),
            )
        except (FieldError, ValueError, TypeError) as error:
            raise ValueError(_("The criteria cannot be used: %s") % error) from error


def _run(relays: list[Relay]) -> bool:
    """Run the first one in this thread, and each other one in a thread of its own. One that dies
    stops them all, and so does a thread that compares the clocks.

    :returns: whether none has died.
    """
    died: list[Relay] = []

    def stop_all(relay: Relay) -> None:
        died.append(relay)
        _stop(relays)

    def run(relay: Relay) -> None:
        try:
            relay.run()
        except BaseException:
            died.append(relay)
            logger.exception("The relay of the database %r has died", relay.runtime.database)
        finally:
            _stop(relays)

    clocks = [_clock_thread(relay.runtime, partial(stop_all, relay)) for relay in relays]

    others = [
        threading.Thread(target=run, args=[relay], name="kjo-relay", daemon=True)
        for relay in relays[1:]
    ]
    for thread in others:
        thread.start()
    run(relays[0])
    for clock in clocks:
        clock.stop()
    for thread in (*others, *clocks):
        # One that hangs in a call of its broker keeps no process that has lost another.
        thread.join(LEFT_AFTER if died else None)
    return not died


def _clock_thread(runtime: Runtime, on_death: Callable[[], None]) -> DutyThread:
    """Have the relay go by its database's clock from its first look on."""
    check = ClockCheck(runtime)
    with suppress(*OUTAGES):  # the thread tells of them
        check.work()
    thread = DutyThread(runtime, "kjo-clock", [check], on_death)
    thread.start()
    return thread


def _stop(relays: list[Relay]) -> None:
    for relay in relays:
        relay.stop()


def _published(relays: list[Relay]) -> int:
    return sum(relay.published_count for relay in relays)


def _check_queue(name: str) -> None:
    """Check that a queue is known.

    :raises ValueError: it is not; says whether a producer has this name.
    """
    try:
        known_queue(name, also=[OUTGOING])
    except ValueError as error:
        raise ValueError(f"{error} {producer_hint(name)}".rstrip()) from error


def producer_hint(name: str) -> str:
    """Return which producer has nearly this class name, or which there are; "" without any."""
    paths = {each.__name__: path_of(each) for each in declared_producers(AbstractProducer)}
    close = difflib.get_close_matches(name.rpartition(".")[2], paths, n=1)
    if close:
        return _("Did you mean the producer %r?") % paths[close[0]]
    return _("Producers: %s.") % ", ".join(paths.values()) if paths else ""


def read_criteria(given: list[str]) -> dict[str, Any]:
    """Read one JSON object, or ``name=value`` pairs whose values are JSON or else text."""
    if len(given) == 1 and given[0].lstrip().startswith("{"):
        try:
            found = json.loads(given[0])
        except ValueError as error:
            raise ValueError(_("--criteria is not JSON: %s") % error) from error
        return dict(found)
    criteria: dict[str, Any] = {}
    for pair in given:
        name, equals, criteria[name] = pair.partition("=")
        if not name or not equals:
            raise ValueError(_("--criteria %r is neither name=value nor a JSON object.") % pair)
        with suppress(ValueError):
            criteria[name] = json.loads(criteria[name])
    return criteria
