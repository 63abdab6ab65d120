"""The handlers, by name: ``@job`` declares them, workers look them up."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from asgiref.sync import iscoroutinefunction
from django.apps import apps
from django.core.exceptions import ImproperlyConfigured

from kjo_django.conf import QueueConf, ScheduleOptions, declared_queues, get_settings, restoring
from kjo_django.exceptions import MessageError, PermanentError
from kjo_django.messages import headers as names
from kjo_django.messages.headers import MAX_TYPE_LENGTH, Message
from kjo_django.messages.serializers import JSON, Serializer, register_serializer, storable_text
from kjo_django.retries import OwnBackoff
from kjo_django.transports.base import Record
from kjo_django.values import Rate, did_you_mean, listed, signature_of

if TYPE_CHECKING:  # The registry is imported before there are models.
    from kjo_django.store.rows import JobRow


@dataclass(frozen=True, slots=True)
class HandlerOptions:
    """How a handler's jobs are run. An option that is None has the value of the queue or of the
    settings."""

    name: str
    queue: str = "default"
    key: str | Callable[..., Any] | None = None
    """The payload field, or a function of the payload, that gives the ordering key."""
    priority: int = 0
    """A number from -100 to 100; the jobs with the highest one run first."""
    max_attempts: int | None = None
    timeout: timedelta | None = None
    backoff: OwnBackoff | None = None
    retry_on: tuple[type[BaseException], ...] = ()
    """The types of errors after which a job is tried again. Empty: after every error."""
    give_up_on: tuple[type[BaseException], ...] = ()
    """The types of errors after which a job is not tried again."""
    result_ttl: timedelta | None = None
    atomic: bool = True
    """Whether the handler runs in the transaction that records the outcome. False: it runs outside
    of that, under a lease that is renewed."""
    database_only: bool = False
    """Whether a roll-back undoes all that the handler does, so that it needs no savepoint of its
    own."""
    takes_context: bool = False
    batch: int | None = None
    """The highest number of jobs in one call. None: the function takes one job."""
    serializer: Serializer = JSON
    result_serializer: Serializer | None = None
    """The serializer of the result. None: that of the payload."""
    rate: Rate | None = None
    """The number of its jobs that all workers together start in a time."""
    rate_key: str | Callable[..., Any] | None = None
    """A field or a function, as for ``key``. The jobs of each value have a rate of their own."""
    concurrency: int | None = None
    """The number of its jobs that run at once in all workers together."""
    concurrency_key: str | Callable[..., Any] | None = None
    """A field or a function, as for ``key``. The jobs of each value are counted by themselves."""
    redact: tuple[str, ...] = ()
    """The names of fields that no user is shown, in addition to those of ``KJO['REDACT']``."""
    schedule: ScheduleOptions | None = None
    """The schedule of a job that is enqueued periodically."""
    unique_for: timedelta | None = None
    unique_by: tuple[str, ...] | None = None
    """The arguments that are compared for ``unique_for`` and ``debounce``. None: all of them."""
    debounce: timedelta | None = None
    debounce_max: timedelta | None = None
    on_conflict: str | None = None


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Handler:
    """A registered function and its options.

    :raises ImproperlyConfigured: the function cannot be called as the options ask.
    """

    def __init__(self, function: Callable[..., Any], options: HandlerOptions) -> None:
        self.function = function
        self.options = options
        self.name: str = options.name
        """The registered name, ``<app>.<function>`` by default."""
        # A callable object is one by its class.
        self.is_async: bool = any(map(iscoroutinefunction, (function, type(function).__call__)))
        self._signature = signature_of(function)
        self._names: tuple[frozenset[str], frozenset[str]] | None = None
        """The names an ordinary function needs and takes, None for one with ``*`` or ``/``."""
        self._argument_names: list[str] | None = None
        """The names a payload may have, None where any will do."""
        if options.batch is not None:
            self._check_batch_function()
            return
        parameters = list(self._signature.parameters.values())[1 if options.takes_context else 0 :]
        self._read(parameters)
        for option in ("key", "rate_key", "concurrency_key", "unique_by"):
            self._check_fields(option)

    def __repr__(self) -> str:
        return f"<Handler {self.name}>"

    def _read(self, parameters: list[inspect.Parameter]) -> None:
        """Note which arguments the function takes."""
        for parameter in parameters:
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise ImproperlyConfigured(
                    f"The job {self.name}: its argument {parameter.name!r} can only be given by "
                    "place, and a payload gives arguments by name. Leave out the '/'."
                )
        named = [parameter for parameter in parameters if parameter.kind in _BY_NAME]
        names = [parameter.name for parameter in named]
        if named == parameters:
            required = frozenset(p.name for p in parameters if p.default is p.empty)
            self._names = required, frozenset(names)
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
            self._argument_names = names

    def _check_fields(self, option: str) -> None:
        """Check that an option names arguments of the function."""
        given = getattr(self.options, option)
        fields = (given or ()) if option == "unique_by" else (given,)
        problem = self.unknown_argument(option, [each for each in fields if isinstance(each, str)])
        if problem is not None:
            raise ImproperlyConfigured(problem)

    def _check_batch_function(self) -> None:
        if self.options.takes_context:
            raise ImproperlyConfigured(
                f"The job {self.name}: with batch=…, each item is its own context; leave "
                "takes_context out."
            )
        try:
            self._signature.bind([])
        except TypeError as error:
            raise ImproperlyConfigured(
                f"The job {self.name}: a function with batch=… takes one list: {error}"
            ) from error

    def arguments(self, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call's arguments without the context; of a batch, the payload of one item.

        :param value: the decoded payload.
        :raises MessageError: the payload is no object.
        :raises PermanentError: the function does not take the payload's keys.
        """
        if not isinstance(value, dict):
            raise MessageError(
                "invalid", f"The payload must be an object, not {type(value).__name__}"
            )
        if self.options.batch is not None:
            return (value,), {}
        problem = self.check_arguments(value)
        if problem is not None:
            raise PermanentError(f"The handler {self.name} does not take this payload: {problem}")
        return (), value

    def unknown_argument(self, option: str, given: Iterable[str]) -> str | None:
        """Return what is wrong with an option that names arguments of the function, or None."""
        names = self._argument_names
        for name in given if names is not None else ():
            if names is not None and name not in names:
                hint = f"{did_you_mean(name, names, '')} It takes: {listed(names)}.".lstrip()
                what = f"{option}={name!r} is not an argument of the function"
                return f"The job {self.name}: {what}. {hint}"
        return None

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The arguments that may be left out, with what they are then."""
        parameters = self._signature.parameters.values()
        return {each.name: each.default for each in parameters if each.default is not each.empty}

    def example_of(self, method: str) -> str:
        """Return how ``method`` is called with the function's arguments, for a message."""
        names = self._argument_names
        arguments = "name=value, …" if names is None else ", ".join(f"{name}=…" for name in names)
        return f"{method}({arguments})"

    def check_arguments(self, payload: dict[str, Any]) -> str | None:
        """Return why the handler cannot take this payload as keyword arguments, or None.

        The signature of a function that takes a batch does not name the fields of a payload.
        """
        if self.options.batch is not None:
            return None
        if self._names is not None:
            required, allowed = self._names
            if required <= payload.keys() <= allowed:
                return None
        try:
            if self.options.takes_context:
                self._signature.bind(None, **payload)
            else:
                self._signature.bind(**payload)
        except TypeError as error:
            return str(error)
        return None

    def required_arguments(self, payload: Collection[str]) -> list[str]:
        """Return the named arguments that the function requires and the payload does not give; none
        of a function that takes a batch."""
        if self.options.batch is not None:
            return []
        parameters = list(self._signature.parameters.values())[self.options.takes_context :]
        return [
            parameter.name
            for parameter in parameters
            if parameter.kind in _BY_NAME
            and parameter.default is parameter.empty
            and parameter.name not in payload
        ]

    def max_attempts(self, queue: QueueConf) -> int:
        """Return how many attempts a message of ``queue`` gets that nobody enqueued here."""
        return self.options.max_attempts or queue.max_attempts

    def result_ttl(self, queue: QueueConf) -> timedelta:
        """Return how long the result or error of such a message is kept."""
        return self.options.result_ttl or queue.result_ttl

    fitted: Callable[[Mapping[str, bytes]], Handler] | None = None
    """Returns the handler for a message with these headers, where headers may change it."""

    refusal: Callable[[Message, JobRow | None], MessageError | None] | None = None
    """Returns why a message must never run, whoever sent it; None for one that may. The second
    argument is the row of the message's job, None where there is none."""

    judges_itself: bool = False
    """Whether the handler itself finds out that a message has taken effect, from the state of the
    message's item. The marker then only keeps two transactions from running it at once; an item
    that was set back runs again."""

    service: str = ""
    """Whose markers its messages get in ``processed_events``; SERVICE_NAME's if empty."""

    runs_middleware: bool = True
    """Whether ``KJO["MIDDLEWARE"]`` surrounds it."""

    observes: bool = False
    """Whether the handler implements the two hooks below; otherwise they are not called."""

    def on_failure(self, attempt: Any) -> None:
        """Called inside the transaction that records a failed attempt or the job's death, with an
        ``engine.attempt.Attempt``. What it raises is logged and undone, the record stands."""

    def on_settled(self, attempt: Any) -> None:
        """Called with an ``Attempt`` once its ending is durable. What it raises is logged."""

    def key_of(self, payload: dict[str, Any]) -> str:
        """Return the ordering key of a payload, or "" for none."""
        declared = self.options.key
        if declared is None:
            return ""
        value = payload.get(declared) if isinstance(declared, str) else declared(**payload)
        return "" if value is None else str(value)


class Route:
    """How the records of a queue's topic become messages for handlers.

    This one is for jobs: our envelope in the headers, the handler by its name. Queues whose topics
    carry something else (items of a template producer, events of other services) bind their own.
    """

    handlers: dict[str, Any] = {}
    """The handlers of a route that has some of its own, by type."""

    def read(self, record: Record, *, max_bytes: int) -> tuple[Message, Handler | None] | None:
        """Return the message of a record and its handler; None skips a record for others.

        Without a handler the message is dead-lettered: no handler here has the name.

        :raises MessageError: the record can never be read; its bytes are dead-lettered.
        """
        message = names.read_message(
            record.value, record.headers, max_bytes=max_bytes, timestamp=record.timestamp
        )
        handler = _handlers.get(message.type) or _own.get(message.type)
        if handler is not None and handler.fitted is not None:
            handler = handler.fitted(record.headers)
        return message, handler


JOBS = Route()
_lock = threading.Lock()
_routes: dict[str, Route] = {}


def bind(queue: str, route: Route) -> None:
    """Read the records of a queue's topic with ``route``."""
    with _lock:
        _routes[queue] = route


def route_of(queue: str) -> Route:
    """Return how the records of this queue's topic are read."""
    return _routes.get(queue, JOBS)


_handlers: dict[str, Handler] = {}
_own: dict[str, Handler] = {}
limited: dict[str, Handler] = {}
"""Those of them, by name, that were declared with a rate or a concurrency."""


def register(handler: Handler, *, is_own: bool = False) -> None:
    """Register a handler under its name, and its serializers.

    :param is_own: the handler is kjo_django's own: found by its name, but not listed among the
        project's handlers, and its queue is not declared by it.
    :raises ImproperlyConfigured: when its name is taken by another function, or is too long.
    """
    name = handler.name
    if not name or len(name) > MAX_TYPE_LENGTH:
        raise ImproperlyConfigured(
            f"The job name {name!r} must have 1 to {MAX_TYPE_LENGTH} characters."
        )
    if storable_text(name) != name or not name.isprintable():
        raise ImproperlyConfigured(
            f"The job name {name!r} has a character that no database keeps or no page can show."
        )
    with _lock:
        functions = handler.function, _handlers.get(name, handler).function
        ours, theirs = map(_place_of, functions)
        if ours != theirs:
            raise ImproperlyConfigured(
                f"Two jobs are named {name!r}: {theirs} and {ours}. Give one of them a name=…"
            )
        (_own if is_own else _handlers)[name] = handler
        if handler.options.rate is not None or handler.options.concurrency is not None:
            limited[name] = handler
        register_serializer(handler.options.serializer)
        if handler.options.result_serializer is not None:
            register_serializer(handler.options.result_serializer)


def unregister(name: str) -> None:
    """Forget a handler; for tests."""
    with _lock:
        _handlers.pop(name, None)
        limited.pop(name, None)


@contextmanager
def isolated() -> Iterator[None]:
    """Forget at the end of a ``with`` block what is declared within it; for tests.

    Handlers with their limits, handlers of events, items and streams, and queues declared in code
    are restored: what was declared before can be used within the block, and is there again after
    it, whatever replaced it meanwhile. Blocks can be nested; ``@isolated()`` is for a whole
    function that is no coroutine. Hooks of ``enqueue_on_save`` stay connected, and serializers stay
    registered.

    A process has one set of declarations. So a worker in a thread has to end within the block, and
    modules with a project's jobs have to be imported before it: a module that is imported for the
    first time within the block declares its jobs only there.
    """
    own = [route.handlers for route in _routes.values()]
    with restoring(_handlers, _own, limited, _routes, *own):
        yield


def find(name: str) -> Handler | None:
    """Return the handler of this name, or None."""
    return _handlers.get(name) or _own.get(name)


def handlers() -> list[Handler]:
    """Return every handler, by name."""
    return [_handlers[name] for name in sorted(_handlers)]


def enqueueable(name: str) -> Handler | None:
    """Return the project's own handler of this name, a function of keyword arguments, or None."""
    handler = _handlers.get(name)
    return handler if type(handler) is Handler else None


def queue_names() -> list[str]:
    """Return every queue that is declared in the settings or used by a handler, sorted."""
    used = {handler.options.queue for handler in handlers()}
    return sorted(used | set(get_settings().queues) | set(declared_queues()))


def consumed_queue_names() -> list[str]:
    """Return those of ``queue_names`` that workers of this project subscribe to."""
    conf = get_settings()
    return [name for name in queue_names() if conf.queue(name).consume]


def default_name(function: Callable[..., Any]) -> str:
    """Return ``<app label>.<function>``; the module stands in where no app contains it."""
    name = getattr(function, "__name__", None)
    if name is None:
        raise ImproperlyConfigured(
            f"{function!r:.100} has no name of its own, as a function has. Give it one: name='…'."
        )
    config = apps.get_containing_app_config(function.__module__) if apps.apps_ready else None
    owner = config.label if config else function.__module__
    return f"{owner}.{name}"


def _place_of(function: Callable[..., Any]) -> str:
    """Return where a function was written; of a callable object or a partial, its class."""
    written = function if hasattr(function, "__qualname__") else type(function)
    return f"{written.__module__}.{written.__qualname__}"
