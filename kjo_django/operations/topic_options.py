"""``topic_options`` of a queue: what its topic should be like (KJO-88 … 93). Pure."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

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


def read(given: Mapping[str, Any], where: str) -> tuple[TopicOptions, Findings]:
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
