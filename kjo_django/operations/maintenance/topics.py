"""Topics: those the settings ask for, what is there, and making the two agree."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from kjo_django import registry
from kjo_django.backends import get_transport, transport_class
from kjo_django.conf import QueueConf, declared_queues, get_settings
from kjo_django.probing import answer_within
from kjo_django.transports.base import TopicDescription, TopicSpec, Transport
from kjo_django.values import flag, mapping, text, whole

MIN_INSYNC_REPLICAS = "min.insync.replicas"

_CONFIG_NAMES = {
    "retention_ms": "retention.ms",
    "segment_ms": "segment.ms",
    "compression_type": "compression.type",
    "cleanup_policy": "cleanup.policy",
}


@dataclass(frozen=True, slots=True)
class TopicOptions:
    """The options of one topic, read and checked."""

    partitions: int = 1
    replication_factor: int = 1
    auto_create: bool = True
    """Workers create the topic when it is missing; otherwise they refuse to start."""
    config: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Findings:
    """What is wrong with options; an error makes its option keep the default."""

    errors: list[tuple[str, str]] = field(default_factory=list)
    """Message and hint."""
    warnings: list[tuple[str, str]] = field(default_factory=list)


def _retention(value: Any) -> int:
    if value == -1 or value == "-1":
        return -1  # Kafka's "for ever"
    return whole(1)(int(value) if isinstance(value, str) and value.isdigit() else value)


_CONVERT: dict[str, Callable[[Any], Any]] = {
    "partitions": whole(1),
    "replication_factor": whole(1),
    "auto_create": flag,
    "config_entries": mapping,
    "retention_ms": _retention,
    "segment_ms": lambda value: _retention(value),
    "compression_type": text,
    "cleanup_policy": text,
}


def read_options(given: Mapping[str, Any], where: str) -> tuple[TopicOptions, Findings]:
    """Read ``topic_options``; ``where`` names them in messages.

    An explicit entry of ``config_entries`` wins over the option of the same meaning (KJO-F17).
    """
    findings = Findings()
    values: dict[str, Any] = {}
    for name, value in given.items():
        convert = _CONVERT.get(name)
        if convert is None:
            findings.errors.append(_unknown(name, where))
            continue
        try:
            values[name] = convert(value)
        except ValueError as error:
            findings.errors.append((f"{where}[{name!r}] must be {error}, not {value!r:.80}.", ""))
    config = _merge_config(values, where, findings)
    options = TopicOptions(
        partitions=values.get("partitions", 1),
        replication_factor=values.get("replication_factor", 1),
        auto_create=values.get("auto_create", True),
        config=config,
    )
    _check_replicas(options, where, findings)
    return options, findings


def _unknown(name: str, where: str) -> tuple[str, str]:
    # Seed 1 spells them in camel case: retentionMs.
    snake = "".join(f"_{c.lower()}" if c.isupper() else c for c in name)
    close = difflib.get_close_matches(snake, _CONVERT, n=1)
    hint = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(sorted(_CONVERT))}."
    return f"{where} has an unknown option {name!r}.", hint


def _merge_config(values: Mapping[str, Any], where: str, findings: Findings) -> dict[str, str]:
    explicit = {name: _entry(value) for name, value in values.get("config_entries", {}).items()}
    config = {
        entry: _entry(values[option]) for option, entry in _CONFIG_NAMES.items() if option in values
    }
    for option, entry in _CONFIG_NAMES.items():
        if entry in config and explicit.get(entry, config[entry]) != config[entry]:
            findings.warnings.append(
                (
                    f"{where} says {option}={config[entry]} and "
                    f"config_entries[{entry!r}]={explicit[entry]}; the latter wins.",
                    f"Remove {option!r}.",
                )
            )
    return {**config, **explicit}


def _entry(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_replicas(options: TopicOptions, where: str, findings: Findings) -> None:
    """KJO-98, and KJO-F16's warning: equal numbers stop producers when one broker is away."""
    wanted = options.config.get(MIN_INSYNC_REPLICAS)
    if wanted is None:
        return
    if not wanted.isdigit() or int(wanted) < 1:
        findings.errors.append(
            (f"{where}: {MIN_INSYNC_REPLICAS} must be a whole number, not {wanted!r:.40}.", "")
        )
    elif int(wanted) > options.replication_factor:
        findings.errors.append(
            (
                f"{where}: {MIN_INSYNC_REPLICAS}={wanted} is more than "
                f"replication_factor={options.replication_factor}; nothing could be published.",
                "Lower the one or raise the other.",
            )
        )
    elif int(wanted) == options.replication_factor > 1:
        findings.warnings.append(
            (
                f"{where}: with {MIN_INSYNC_REPLICAS} = replication_factor = {wanted}, one broker "
                "away stops every producer.",
                f"Use replication_factor={int(wanted) + 1}.",
            )
        )


COMPACTED = "cleanup.policy"

PATIENCE = 5.0
"""Seconds; a broker that is there has answered by then, one that is frozen takes half a minute."""

Queues = Iterable[str | QueueConf] | None
"""Names or options of queues; None means all that are declared or used by a handler."""


@dataclass(frozen=True, slots=True)
class WantedTopic:
    """A topic the settings ask for."""

    transport: str
    spec: TopicSpec
    auto_create: bool
    queues: tuple[str, ...]
    is_dead_letter_topic: bool = False


@dataclass(slots=True)
class TopicReport:
    """A topic as wanted, as it is, and what there is to do."""

    name: str
    transport: str
    queues: list[str]
    action: str
    """``create``, ``grow``, ``none``, or ``by hand`` for what no program should change."""
    wanted_partitions: int
    partitions: int | None
    wanted_replication_factor: int
    replication_factor: int | None
    differences: list[str] = field(default_factory=list)
    is_ok: bool = True

    def as_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return asdict(self)


def wanted(queues: Queues = None) -> list[WantedTopic]:
    """Return the topics of the queues (all known ones if not given), each once.

    Dead-letter topics are wanted where the transport keeps what was read; elsewhere the table is
    the only place of dead letters.

    :raises ImproperlyConfigured: when options are wrong.
    """
    found: dict[tuple[str, str], WantedTopic] = {}
    conf = get_settings()
    names = registry.queue_names() if queues is None else map(_name, queues)
    for name in sorted(set(names)):
        queue = conf.queue(name)
        options = _options(queue)
        _add(found, queue, _spec(queue.topic, options), options, is_dead_letter_topic=False)
        if transport_class(queue.transport).capabilities.replay:
            spec = _dead_letter_spec(queue, options)
            _add(found, queue, spec, options, is_dead_letter_topic=True)
    return list(found.values())


def specs(queues: Queues = None) -> dict[str, list[TopicSpec]]:
    """Return the specs of ``wanted`` by transport alias."""
    result: dict[str, list[TopicSpec]] = {}
    for topic in wanted(queues):
        result.setdefault(topic.transport, []).append(topic.spec)
    return result


def plan(queues: Queues = None) -> list[TopicReport]:
    """Compare what is wanted with what is there; changes nothing."""
    reports = []
    for alias, topics in _by_transport(wanted(queues)).items():
        transport = get_transport(alias)
        present = transport.describe_topics([topic.spec.name for topic in topics])
        by_name = {description.name: description for description in present}
        for topic in topics:
            there = by_name.get(topic.spec.name, TopicDescription(topic.spec.name, None))
            reports.append(_compare(topic, there, transport))
    return reports


def create(queues: Queues = None) -> list[str]:
    """Create what is missing and grow what is too small; returns a line for each change."""
    lines: list[str] = []
    for alias, topics in _by_transport(wanted(queues)).items():
        lines += get_transport(alias).ensure_topics([topic.spec for topic in topics])
    return lines


def ensure_topics(queues: Queues = None) -> list[str]:
    """What a worker does before it subscribes: create topics that may be created by themselves.

    :raises ImproperlyConfigured: when a topic is missing whose ``auto_create`` is off (KJO-90).
    """
    lines: list[str] = []
    for alias, topics in _by_transport(wanted(queues)).items():
        transport = get_transport(alias)
        by_hand = [topic for topic in topics if not topic.auto_create]
        _refuse_missing(transport, by_hand)
        automatic = [topic.spec for topic in topics if topic.auto_create]
        if automatic:
            lines += transport.ensure_topics(automatic)
    return lines


def ensure_topics_soon(queues: Sequence[QueueConf]) -> list[str]:
    """What a worker does before it starts anything: ``ensure_topics``, for which queues of a
    transport without topics to make wait ``PATIENCE`` at most.

    :raises TimeoutError: there are such queues, and the broker of others has not answered yet.
    """
    needs = {_makes_topics(transport_class(queue.transport)) for queue in queues}
    if len(needs) < 2:
        return ensure_topics(queues)
    return answer_within(PATIENCE, functools.partial(ensure_topics, queues))


# --- Details --------------------------------------------------------------------------------------


def _name(queue: str | QueueConf) -> str:
    return queue if isinstance(queue, str) else queue.name


def _options(queue: QueueConf) -> TopicOptions:
    where = f"KJO['QUEUES'][{queue.name!r}]['topic_options']"
    options, findings = read_options(queue.topic_options, where)
    if findings.errors:
        raise ImproperlyConfigured(" ".join(findings.errors[0]).strip())
    return options


def _spec(name: str, options: TopicOptions) -> TopicSpec:
    return TopicSpec(name, options.partitions, options.replication_factor, dict(options.config))


def _dead_letter_spec(queue: QueueConf, options: TopicOptions) -> TopicSpec:
    """As many partitions as the source, so that a dead letter keeps its partition; never compacted,
    or of two dead letters of one key only the second would be left."""
    spec = _spec(queue.dead_letter_topic, options)
    if COMPACTED not in spec.config:
        return spec
    return replace(spec, config={**spec.config, COMPACTED: "delete"})


def _add(
    found: dict[tuple[str, str], WantedTopic],
    queue: QueueConf,
    spec: TopicSpec,
    options: TopicOptions,
    *,
    is_dead_letter_topic: bool,
) -> None:
    """Queues may share a topic; then the larger numbers hold and both must allow creation."""
    place = (queue.transport, spec.name)
    before = found.get(place)
    if before is None:
        found[place] = WantedTopic(
            queue.transport, spec, options.auto_create, (queue.name,), is_dead_letter_topic
        )
        return
    merged = TopicSpec(
        spec.name,
        max(spec.partitions, before.spec.partitions),
        max(spec.replication_factor, before.spec.replication_factor),
        {**spec.config, **before.spec.config},
    )
    found[place] = replace(
        before,
        spec=merged,
        auto_create=before.auto_create and options.auto_create,
        queues=(*before.queues, queue.name),
        is_dead_letter_topic=before.is_dead_letter_topic and is_dead_letter_topic,
    )


def _by_transport(topics: Sequence[WantedTopic]) -> dict[str, list[WantedTopic]]:
    result: dict[str, list[WantedTopic]] = {}
    for topic in topics:
        result.setdefault(topic.transport, []).append(topic)
    return result


def _administers_topics(transport: Transport) -> bool:
    return _makes_topics(type(transport))


def _makes_topics(kind: type[Transport]) -> bool:
    return kind.ensure_topics is not Transport.ensure_topics


def _compare(topic: WantedTopic, there: TopicDescription, transport: Transport) -> TopicReport:
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
    if not _administers_topics(transport):
        return report
    if there.partitions is None:
        report.action, report.is_ok = "create", False
        report.differences.append("does not exist")
        return report
    if there.partitions < spec.partitions:
        report.action, report.is_ok = "grow", False
        report.differences.append(f"has {there.partitions} partitions, not {spec.partitions}")
    elif there.partitions > spec.partitions:
        # Partitions cannot be taken away, and more of them do no harm.
        report.differences.append(f"has {there.partitions} partitions, {spec.partitions} are asked")
    by_hand = _unchangeable(spec, there)
    if by_hand:
        report.differences += by_hand
        report.is_ok = False
        if report.action == "none":
            report.action = "by hand"
    return report


def _unchangeable(spec: TopicSpec, there: TopicDescription) -> list[str]:
    lines = []
    if there.replication_factor not in (None, spec.replication_factor):
        lines.append(
            f"has replication factor {there.replication_factor}, not {spec.replication_factor}"
        )
    # Without the right to read it the configuration is empty, which says nothing.
    lines += [
        f"has {name}={there.config.get(name, '(default)')}, not {value}"
        for name, value in sorted(spec.config.items() if there.config else ())
        if there.config.get(name) != value
    ]
    lines += _too_few_replicas(there)
    return lines


def _too_few_replicas(there: TopicDescription) -> list[str]:
    least = there.config.get(MIN_INSYNC_REPLICAS, "")
    factor = there.replication_factor
    if factor is None or not least.isdigit() or int(least) <= factor:
        return []
    return [
        f"has {MIN_INSYNC_REPLICAS}={least} with replication factor {factor}: "
        "nothing can be published"
    ]


def _refuse_missing(transport: Transport, topics: Sequence[WantedTopic]) -> None:
    if not topics or not _administers_topics(transport):
        return
    present = transport.describe_topics([topic.spec.name for topic in topics])
    missing = {description.name for description in present if description.partitions is None}
    for topic in topics:
        if topic.spec.name in missing:
            raise ImproperlyConfigured(
                f"The topic {topic.spec.name!r} of queue {topic.queues[0]!r} does not exist, and "
                "its topic_options['auto_create'] is False. Create it with "
                "`manage.py kjo_topics create`."
            )


def findings() -> Mapping[str, Findings]:
    """Return what is wrong with the topic options, by queue, for the system checks."""
    conf = get_settings()
    return {
        name: read_options(
            conf.queue(name).topic_options, f"KJO['QUEUES'][{name!r}]['topic_options']"
        )[1]
        for name in sorted({"default", *conf.queues, *declared_queues()})
    }
