"""Who is meant, as digests: a request, its job and its entries in logs hold no personal data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from django.conf import settings
from django.utils.translation import gettext_noop as _

from kjo_django.exceptions import PermanentError
from kjo_django.operations.search import text_of_value, values_at
from kjo_django.refusals import RefusedError, Wording

ANY_FIELD = "*"
"""In place of a path: the value of any field."""
MOST = 1000
"""Keys, ids and fields of one request together."""
MAX_LENGTH = 1000
"""Characters of a key, an id, a path or a value."""
EXAMPLE = (
    '{"keys": ["customer-7"], "ids": ["signup-7"], "fields": ["customer.email=ada@example.org"]}'
)
"""A person as a request names one."""
OTHER_SECRET_KEY = _(
    "The request was made with another SECRET_KEY than this process has: it would find nobody. "
    "Ask again, with one SECRET_KEY in all processes."
)


@lru_cache(maxsize=4)
def _secret(secret_key: str) -> bytes:
    return hashlib.sha256(b"kjo_django.personal_data\0" + secret_key.encode()).digest()


def _digest(text: str) -> str:
    key = _secret(str(settings.SECRET_KEY))
    data = text.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, key=key, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Person:
    """Digests of what is known of a person, made with ``SECRET_KEY``.

    A row is the person's if it has one of the keys, one of the ids, or one of the values.
    """

    keys: frozenset[str]
    """Of jobs, dead letters and messages."""
    ids: frozenset[str]
    """Ids of jobs and messages, and unique ids of jobs and workflows."""
    fields: tuple[tuple[str, str], ...]
    """Paths such as ``customer.email`` into payloads, results and event data, with the digest of
    the value there. ``*`` is every path."""

    @classmethod
    def of(
        cls,
        *,
        keys: Iterable[str] = (),
        ids: Iterable[str] = (),
        fields: Iterable[tuple[str, str]] = (),
    ) -> Person:
        """Return the digests of what is known of a person.

        :param fields: paths and values. A value is compared as text: ``17`` is the number, too.
        :raises ValueError: nothing is given, or one of them is empty or too long.
        """
        keys, ids, fields = list(keys), list(ids), list(fields)
        texts = [*keys, *ids, *(text for field in fields for text in field)]
        if not texts:
            raise RefusedError(_("Name the person: give at least one key, id or value of a field"))
        if len(texts) > MOST:
            raise RefusedError(_("Give at most %(most)s keys, ids and fields at once"), most=MOST)
        if not all(isinstance(text, str) and 0 < len(text) <= MAX_LENGTH for text in texts):
            length = _("Keys, ids, paths and values have 1 to %(most)s characters")
            raise RefusedError(length, most=MAX_LENGTH)
        for path, _value in fields:
            if not all(path.split(".")):
                raise RefusedError(
                    _("A field is a path such as customer.email, or * for every field")
                )
        return cls(
            frozenset(map(_digest, keys)),
            frozenset(map(_digest, ids)),
            tuple((path, _digest(value)) for path, value in fields),
        )

    @classmethod
    def parse(cls, given: Any) -> Person:
        """Return the digests of what a decoded JSON object names by ``keys``, ``ids`` and
        ``fields``, each a list of texts; a field is written ``PATH=VALUE``.

        :raises ValueError: it is no such object, or ``of`` refuses what it names.
        """
        known = {"keys": [], "ids": [], "fields": [], **given} if isinstance(given, dict) else {}
        lists_only = all(isinstance(texts, list) for texts in known.values())
        if len(known) != 3 or not lists_only:
            text = _("Name the person by an object such as %(example)s")
            raise RefusedError(text, example=EXAMPLE)
        fields = [str(text).partition("=") for text in known["fields"]]
        for path, equals, _value in fields:
            if not equals:
                text = _("%(path).80r is not PATH=VALUE, such as customer.email=ada@example.org")
                raise RefusedError(text, path=path)
        pairs = [(path, value) for path, _equals, value in fields]
        return cls.of(keys=known["keys"], ids=known["ids"], fields=pairs)

    def has_key(self, key: str | bytes | None) -> bool:
        """Return whether a key is the person's."""
        if not self.keys or not key:
            return False
        return _digest(key if isinstance(key, str) else key.decode("utf-8", "replace")) in self.keys

    def has_id(self, *ids: str | None) -> bool:
        """Return whether one of the ids is the person's."""
        return bool(self.ids) and any(id and _digest(id) in self.ids for id in ids)

    def has_value(self, value: Any) -> bool:
        """Return whether a decoded payload or result has one of the values in its field."""
        for path, wanted in self.fields:
            found = _leaves(value) if path == ANY_FIELD else values_at(value, path.split("."))
            for each in found:
                if not isinstance(each, dict | list) and _digest(text_of_value(each)) == wanted:
                    return True
        return False

    def has_text(self, text: str | None) -> bool:
        """Return whether a text is one of the keys, ids or values."""
        digest = _digest(text or "")
        return digest in {*self.keys, *self.ids, *(value for _, value in self.fields)}

    # --- As JSON ----------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """Return the digests ready for JSON."""
        return {
            "keys": sorted(self.keys),
            "ids": sorted(self.ids),
            "fields": [list(field) for field in self.fields],
            "check": _digest(""),
        }

    @classmethod
    def load(cls, stored: Any) -> Person:
        """Return what ``dump`` made ready for JSON.

        :raises PermanentError: it was made with another ``SECRET_KEY``, and would find nobody.
        """
        if not isinstance(stored, Mapping) or stored.get("check") != _digest(""):
            raise PermanentError(Wording(OTHER_SECRET_KEY))
        fields = tuple((str(path), str(value)) for path, value in stored["fields"])
        return cls(frozenset(stored["keys"]), frozenset(stored["ids"]), fields)

    def __str__(self) -> str:
        """Say how the person was looked for, without saying who it is."""
        counts = [f"keys ({len(self.keys)})"] if self.keys else []
        counts += [f"ids ({len(self.ids)})"] if self.ids else []
        paths = sorted({path for path, _ in self.fields})
        return ", ".join([*counts, *(f"the field {path}" for path in paths)])


def _leaves(value: Any) -> Iterator[Any]:
    rest = [value]
    while rest:
        one = rest.pop()
        if isinstance(one, dict):
            rest += one.values()
        elif isinstance(one, list | tuple):
            rest += one
        else:
            yield one
