"""Settings from the environment, for what the ``KJO`` dict leaves out. Pure.

``KJO_CONCURRENCY=8`` stands for ``KJO = {"CONCURRENCY": 8}``: a value is read as JSON, and as text
where it is none or where the setting is a text: ``KJO_RELEASE=1.10`` is no number. Two names of
template classes configure a server each:

    KJO_KAFKA_BROKERS   host:port,host:port   the transport "default"
    KJO_REDIS_URL       redis://host:port/0   the coordination
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

KAFKA_BROKERS = "KJO_KAFKA_BROKERS"
REDIS_URL = "KJO_REDIS_URL"


def read(
    keys: Iterable[str], environ: Mapping[str, str], texts: Collection[str] = ()
) -> dict[str, Any]:
    """Return the settings the environment gives; an empty variable gives none.

    :param keys: the settings there are.
    :param texts: those of them that are texts.
    """
    found: dict[str, Any] = {}
    if brokers := environ.get(KAFKA_BROKERS):
        found["TRANSPORTS"] = {
            "default": {
                "BACKEND": "kjo_django.transports.kafka.KafkaTransport",
                "OPTIONS": {"bootstrap.servers": brokers},
            }
        }
    if url := environ.get(REDIS_URL):
        found["COORDINATION"] = {
            "BACKEND": "kjo_django.coordination.redis.RedisCoordination",
            "OPTIONS": {"URL": url},
        }
    for key in keys:
        if text := environ.get(f"KJO_{key}"):
            found[key] = _value(text, key in texts)
    return found


def _value(text: str, is_text: bool) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return text if is_text and not isinstance(value, str | None) else value
