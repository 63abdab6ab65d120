"""Topics: read their options, compare them with the broker's topics, create and grow them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.utils.translation import gettext as _

from kjo_django import registry, values
from kjo_django.conf import QueueConf, declared_queues, get_settings
from kjo_django.probing import answer_within
from kjo_django.runtime import get_transport, transport_class
from kjo_django.transports.base import TopicDescription, TopicSpec, Transport
from kjo_django.values import Problem, flag, mapping, option, text, whole

MIN_INSYNC_REPLICAS = "min.insync.replicas"
_CLEANUP = "cleanup.policy"

_CONFIG_NAMES = {
    "retention_ms": "retention.ms",
    "segment_ms": "segment.ms",
    "compression_type": "compression.type",
    "cleanup_policy": _CLEANUP,
}


def _retention(value: Any) -> int:
    if value == -1 or value == "-1":
        return -1  # Kafka's "for ever"
    return whole(1)(int(value) if isinstance(value, str) and value.isdigit() else value)


@dataclass(frozen=True)
class TopicOptions:
    """The options of one topic."""

    partitions: int = option(whole(1), 1, "Partitions it is created with, or grows to.")
    replication_factor: int = option(whole(1), 1, "Replicas of each partition.")
    auto_create: bool = option(
        flag, True, "Workers create it when it is missing; else they refuse to start."
    )
    config_entries: dict[str, Any] = option(mapping, {}, "Entries of the broker's configuration.")
    retention_ms: int | None = option(_retention, None, "Milliseconds records are kept; -1: ever.")
    segment_ms: int | None = option(_retention, None, "Milliseconds until a segment is closed.")
    compression_type: str | None = option(text, None, "Such as gzip, lz4, zstd.")
    cleanup_policy: str | None = option(text, None, "delete or compact.")

    @property
    def config(self) -> dict[str, str]:
        """The topic's configuration at the broker. An explicit entry wins over the option of the
        same meaning."""
        explicit = {name: _entry(value) for name, value in self.config_entries.items()}
        return self.named_config | explicit

    @property
    def named_config(self) -> dict[str, str]:
        """The entries that have an option of their own."""
        values = {entry: getattr(self, name) for name, entry in _CONFIG_NAMES.items()}
        return {entry: _entry(value) for entry, value in values.items() if value is not None}


def read_options(
    given: Mapping[str, Any], where: str
) -> tuple[TopicOptions, list[Problem], list[Problem]]:
    """Return the options in ``topic_options``, their errors, and warnings about them.

    An option with an error has its default.

    :param where: the name of the options in messages.
    """
    options, errors = values.read_options(TopicOptions, given, where)
    warnings, config = [], options.config
    for entry, value in options.named_config.items():
        if config[entry] != value:
            name = next(name for name, each in _CONFIG_NAMES.items() if each == entry)
            message = (
                f"{where} says {name}={value} and config_entries[{entry!r}]={config[entry]}; "
                "the latter wins."
            )
            warnings.append(Problem(message, f"Remove {name!r}."))
    # More replicas than there are stop every publish. As many stop it while one broker is away.
    wanted = config.get(MIN_INSYNC_REPLICAS, "1")
    if not wanted.isdigit() or int(wanted) < 1:
        message = f"{where}: {MIN_INSYNC_REPLICAS} must be a whole number, not {wanted!r:.40}."
        errors.append(Problem(message, ""))
    elif int(wanted) > options.replication_factor:
        message = (
            f"{where}: {MIN_INSYNC_REPLICAS}={wanted} is more than "
            f"replication_factor={options.replication_factor}; nothing could be published."
        )
        errors.append(Problem(message, "Lower the one or raise the other."))
    elif int(wanted) == options.replication_factor > 1:
        message = (
            f"{where}: with {MIN_INSYNC_REPLICAS} = replication_factor = {wanted}, one broker "
            "away stops every producer."
        )
        warnings.append(Problem(message, f"Use replication_factor={int(wanted) + 1}."))
    return options, errors, warnings


def _entry(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def problems() -> tuple[list[Problem], list[Problem]]:
    """Return the errors in the topic options of all queues, and the warnings about them."""
    conf = get_settings()
    errors: list[Problem] = []
    warnings: list[Problem] = []
    for name in sorted({"default", *conf.queues, *declared_queues()}):
        _, wrong, doubtful = _options_of(conf.queue(name))
        errors += wrong
        warnings += doubtful
    return errors, warnings


def _options_of(queue: QueueConf) -> tuple[TopicOptions, list[Problem], list[Problem]]:
    return read_options(queue.topic_options, f"KJO['QUEUES'][{queue.name!r}]['topic_options']")


# --- The topics that are wanted -------------------------------------------------------------------

PATIENCE = 5.0
"""Seconds in which a broker answers. One that is frozen takes half a minute."""

Queues = Iterable[str | QueueConf] | None
"""Names or options of queues; None means all that are declared or used by a handler."""


@dataclass(frozen=True, slots=True)
class WantedTopic:
    """A topic the settings ask for."""

    transport: str
    spec: TopicSpec
    auto_create: bool
    queues: tuple[str, ...]

    def merged(self, other: WantedTopic) -> WantedTopic:
        """Return the topic that two queues share.

        The larger numbers hold, both queues must allow its creation, and the configuration of the
        first queue wins.
        """
        spec = TopicSpec(
            self.spec.name,
            max(self.spec.partitions, other.spec.partitions),
            max(self.spec.replication_factor, other.spec.replication_factor),
            {**other.spec.config, **self.spec.config},
        )
        is_automatic = self.auto_create and other.auto_create
        return WantedTopic(self.transport, spec, is_automatic, (*self.queues, *other.queues))


def wanted(queues: Queues = None) -> list[WantedTopic]:
    """Return the topics of the queues, each once.

    Dead-letter topics are among them where the transport keeps records that were read. Elsewhere
    only the table holds dead letters.

    :raises ImproperlyConfigured: an option is wrong.
    """
    found: dict[tuple[str, str], WantedTopic] = {}
    given = registry.queue_names() if queues is None else queues
    names = {queue if isinstance(queue, str) else queue.name for queue in given}
    for topic in (topic for name in sorted(names) for topic in _topics_of(name)):
        place = (topic.transport, topic.spec.name)
        found[place] = found[place].merged(topic) if place in found else topic
    return list(found.values())


def _topics_of(name: str) -> list[WantedTopic]:
    """Return the topics of a queue.

    :raises ImproperlyConfigured: an option is wrong.
    """
    queue = get_settings().queue(name)
    options, errors, _ = _options_of(queue)
    if errors:
        raise ImproperlyConfigured(str(errors[0]))
    numbers, config = (options.partitions, options.replication_factor), options.config
    specs = [TopicSpec(topic, *numbers, config) for topic in queue.topics]
    if transport_class(queue.transport).capabilities.replay:
        # With as many partitions as the source, a dead letter keeps its partition. Compacted, of
        # two dead letters of one key only the second would be left.
        kept = {**config, _CLEANUP: "delete"} if _CLEANUP in config else config
        specs.append(TopicSpec(queue.dead_letter_topic, *numbers, kept))
    return [WantedTopic(queue.transport, spec, options.auto_create, (name,)) for spec in specs]


def _by_transport(queues: Queues) -> Iterator[tuple[str, list[WantedTopic]]]:
    topics = wanted(queues)
    for alias in dict.fromkeys(topic.transport for topic in topics):
        yield alias, [topic for topic in topics if topic.transport == alias]


# --- Creating them --------------------------------------------------------------------------------


def create(queues: Queues = None) -> list[str]:
    """Create missing topics and grow those that are too small; return a line for each change."""
    lines: list[str] = []
    for alias, topics in _by_transport(queues):
        lines += get_transport(alias).ensure_topics([topic.spec for topic in topics])
    return lines


def ensure_topics(queues: Queues = None) -> list[str]:
    """Create the topics whose ``auto_create`` is on, before a worker subscribes to them.

    :raises ImproperlyConfigured: a topic is missing whose ``auto_create`` is off.
    """
    lines: list[str] = []
    for alias, topics in _by_transport(queues):
        transport = get_transport(alias)
        by_hand = [topic for topic in topics if not topic.auto_create]
        if by_hand and _makes_topics(type(transport)):
            _check_present(transport, by_hand)
        automatic = [topic.spec for topic in topics if topic.auto_create]
        if automatic:
            lines += transport.ensure_topics(automatic)
    return lines


def _check_present(transport: Transport, topics: Sequence[WantedTopic]) -> None:
    """Check that topics are there that nobody creates by himself.

    :raises ImproperlyConfigured: one is missing.
    """
    present = transport.describe_topics([topic.spec.name for topic in topics])
    missing = {each.name for each in present if each.partitions is None}
    for topic in topics:
        if topic.spec.name in missing:
            raise ImproperlyConfigured(
                f"The topic {topic.spec.name!r} of queue {topic.queues[0]!r} does not exist, and "
                "its topic_options['auto_create'] is False. Create it with `manage.py kjo_topics "
                "create`."
            )


def ensure_topics_soon(queues: Sequence[QueueConf]) -> list[str]:
    """Call ``ensure_topics`` before a worker starts anything.

    If some queues are of a transport that needs no topics, they wait ``PATIENCE`` at most.

    :raises TimeoutError: there are such queues, and the broker of the others has not answered.
    """
    needs = {_makes_topics(transport_class(queue.transport)) for queue in queues}
    if len(needs) < 2:
        return ensure_topics(queues)
    return answer_within(PATIENCE, functools.partial(ensure_topics, queues))


def _makes_topics(kind: type[Transport]) -> bool:
    return kind.ensure_topics is not Transport.ensure_topics


# --- Comparing them with the broker's -------------------------------------------------------------


@dataclass(slots=True)
class TopicReport:
    """A topic as the settings ask for it, as the broker has it, and the action that is needed."""

    name: str
    transport: str
    queues: list[str]
    action: str
    """``create``, ``grow``, ``none``, or ``by hand`` for a difference no program should change."""
    wanted_partitions: int
    partitions: int | None
    wanted_replication_factor: int
    replication_factor: int | None
    differences: list[str] = field(default_factory=list)
    is_ok: bool = True


def plan(queues: Queues = None) -> list[TopicReport]:
    """Return a comparison of each topic in the settings with the broker's. Nothing is changed."""
    reports = []
    for alias, topics in _by_transport(queues):
        transport = get_transport(alias)
        present = transport.describe_topics([topic.spec.name for topic in topics])
        by_name = {description.name: description for description in present}
        for topic in topics:
            there = by_name.get(topic.spec.name, TopicDescription(topic.spec.name, None))
            reports.append(_compare(topic, there, _makes_topics(type(transport))))
    return reports


def _compare(topic: WantedTopic, there: TopicDescription, is_made: bool) -> TopicReport:
    spec = topic.spec
    report = TopicReport(
        name=spec.name,
        transport=topic.transport,
        queues=list(topic.queues),
        action="none",
        wanted_partitions=spec.partitions,
        partitions=there.partitions,
        wanted_replication_factor=spec.replication_factor,
        replication_factor=there.replication_factor,
    )
    if not is_made:
        return report
    if there.partitions is None:
        report.action, report.is_ok = "create", False
        report.differences.append(_("does not exist"))
        return report
    if there.partitions < spec.partitions:
        report.action, report.is_ok = "grow", False
        text = _("has %(partitions)d partitions, not %(wanted)d")
        report.differences.append(text % _counts(there, spec))
    elif there.partitions > spec.partitions:
        # Partitions cannot be taken away, and more of them do no harm.
        text = _("has %(partitions)d partitions, %(wanted)d are asked")
        report.differences.append(text % _counts(there, spec))
    by_hand = _unchangeable(spec, there)
    if by_hand:
        report.differences += by_hand
        report.is_ok = False
        if report.action == "none":
            report.action = "by hand"
    return report


def _counts(there: TopicDescription, spec: TopicSpec) -> dict[str, int | None]:
    return {"partitions": there.partitions, "wanted": spec.partitions}


def _unchangeable(spec: TopicSpec, there: TopicDescription) -> list[str]:
    lines, factor = [], there.replication_factor
    if factor not in (None, spec.replication_factor):
        text = _("has replication factor %(factor)s, not %(wanted)s")
        lines.append(text % {"factor": factor, "wanted": spec.replication_factor})
    # Without the right to read it the configuration is empty, which says nothing.
    text = _("has %(entry)s, not %(wanted)s")
    lines += [
        text % {"entry": f"{name}={there.config.get(name, '(default)')}", "wanted": value}
        for name, value in sorted(spec.config.items() if there.config else ())
        if there.config.get(name) != value
    ]
    least = there.config.get(MIN_INSYNC_REPLICAS, "")
    if factor is not None and least.isdigit() and int(least) > factor:
        text = _("has %(entry)s with replication factor %(factor)s: nothing can be published")
        lines.append(text % {"entry": f"{MIN_INSYNC_REPLICAS}={least}", "factor": factor})
    return lines
