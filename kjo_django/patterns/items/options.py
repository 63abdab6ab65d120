"""Options of template classes: class attributes, or a dict with the same names."""

# ruff: noqa: RUF009 - option() declares a field, as dataclasses.field does.

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, TypeVar

from django.core.exceptions import ImproperlyConfigured

from kjo_django.patterns.items.hashing import ALGORITHMS
from kjo_django.values import (
    duration,
    flag,
    option,
    optional_duration,
    optional_text,
    read_options,
    text,
    texts,
    whole,
)

T = TypeVar("T")


def prefix_text(value: Any) -> str:
    """Text without a colon."""
    if not isinstance(value, str) or not value.strip() or ":" in value:
        # CONS:EMAIL:VIP:7 could be item VIP:7 of EMAIL as well as item 7 of EMAIL:VIP.
        raise ValueError("text without ':', which ends the prefix in key names")
    return value


def _optional_prefix(value: Any) -> str | None:
    return None if value is None else prefix_text(value)


def _one_of(*allowed: str) -> Any:
    def choose(value: Any) -> str:
        if value not in allowed:
            raise ValueError(f"one of {', '.join(map(repr, allowed))}")
        return str(value)

    return choose


def _optional_texts(value: Any) -> tuple[str, ...] | None:
    return None if value is None else texts(value)


@dataclass(frozen=True)
class RedisOptions:
    """``redis_options`` as one dict."""

    key_prefix: str | None = option(_optional_prefix, None, "PREFIX of the key names.")
    processing_ttl: timedelta | None = option(optional_duration, None, "Of CONS:PREFIX:id.")
    sent_ttl: timedelta | None = option(optional_duration, None, "Of PREFIX_SENT:id.")


@dataclass(frozen=True)
class ProducerOptions:
    """The options of a template producer. Class attributes have these names."""

    queue: str | None = option(
        optional_text, None, "Queue whose topic, transport, prefix and TTLs it uses."
    )
    topic: str | None = option(optional_text, None, "Topic; the queue's if not given.")
    transport: str | None = option(optional_text, None, "Alias in TRANSPORTS.")
    key_prefix: str | None = option(_optional_prefix, None, "PREFIX of its key names.")
    processing_ttl: timedelta | None = option(
        optional_duration, None, "Its consumers' lease; twice that is the default of sent_ttl."
    )
    sent_ttl: timedelta | None = option(
        optional_duration, None, "How long unchanged content is not sent again."
    )
    claim_ttl: timedelta = option(
        duration,
        timedelta(seconds=60),
        "After how long items of a producer that died while sending are free again; longer than a "
        "send may take.",
    )
    hash_algorithm: str = option(_one_of(*ALGORITHMS), "sha256", "sha256, or md5 to agree.")
    hash_fields: tuple[str, ...] | None = option(
        _optional_texts, None, "Fields whose change makes content new; everything if not given."
    )
    key_format: str = option(text, "{type}-{id}", "Key of a record, of type, id and hash.")
    dedup_across_ids: bool = option(
        flag, False, "Also skip content that was sent under another id."
    )
    without_coordination: str = option(
        _one_of("stop", "send"),
        "stop",
        "While Redis is down: stop with an error, or send without de-duplication.",
    )
    batch_size: int = option(whole(1), 1000, "Most items claimed and sent at once.")


def snake(name: str) -> str:
    """Return ``keyPrefix`` as ``key_prefix``. Both spellings are accepted."""
    return re.sub(r"(?<=[a-z0-9])([A-Z])", lambda m: f"_{m[1].lower()}", name)


def flatten(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a config dict in snake case, with what ``redis_options`` holds beside the rest.

    :raises ImproperlyConfigured: ``redis_options`` has a wrong or unknown entry.
    """
    flat = {snake(name): value for name, value in config.items()}
    nested = flat.pop("redis_options", None)
    if nested is None:
        return flat
    if isinstance(nested, RedisOptions):
        given = {f.name: getattr(nested, f.name) for f in fields(nested)}
    else:
        given = {snake(name): value for name, value in dict(nested).items()}
    read_class_options(RedisOptions, given, f"{where}.redis_options")
    return {**{name: value for name, value in given.items() if value is not None}, **flat}


def read_class_options(kind: type[T], given: Mapping[str, Any], where: str) -> T:
    """Return the options, checked.

    :raises ImproperlyConfigured: naming the first that is wrong.
    """
    options, problems = read_options(kind, given, where)
    if problems:
        raise ImproperlyConfigured(str(problems[0]))
    found: T = options
    return found


def class_attributes(cls: type[Any], kind: type[Any]) -> dict[str, Any]:
    """Return the options of ``kind`` that the class gives."""
    names = (f.name for f in fields(kind))
    return {name: getattr(cls, name) for name in names if hasattr(cls, name)}
