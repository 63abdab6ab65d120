"""Coordination through Redis or Valkey, on the raw connection of a django-redis cache.

``OPTIONS``:

``CACHE``
    Alias in ``CACHES``, default "default". Give it short timeouts, e.g. ``"OPTIONS":
    {"SOCKET_CONNECT_TIMEOUT": 1, "SOCKET_TIMEOUT": 1}``: without them a Redis that does not answer
    holds a worker for as long as the system lets it.
``URL``
    ``redis://host:port/0`` to use instead of a cache, with timeouts of 5 s.
``KEY_PREFIX``
    Put before every key and channel, default "": keys are then exactly the names given, since the
    cache's own KEY_PREFIX and VERSION are not applied.

Keys, by example::

    CONS:EMAILS:7             the token of who processes the item; expires with the lease
    DELIVERIES:CONS:EMAILS:7  how often it was claimed; forgotten on release, else after a day
    PREFIX_SENT:7             a mark; expires with its TTL
    STARTS:RATE:job:shop.call  when its jobs have started lately, by parts of its window; expires
    SLOT:job:shop.call:1      the token of who runs the first of its jobs; expires with the lease

Leases and their counts are touched by one script, so on Redis Cluster all names of a call must
share a slot: use a hash tag, ``KEY_PREFIX = "{kjo}"``. The tests meet single servers only.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any

from django.core.cache import InvalidCacheBackendError
from django.core.exceptions import ImproperlyConfigured

from kjo_django.coordination.base import (
    FIRST_CLAIM,
    Claim,
    Coordination,
    ReconnectingListener,
    slot_name,
)
from kjo_django.coordination.starts import (
    FARTHEST,
    Ask,
    Pace,
    Permit,
    Used,
    paces_of,
    part_of,
    reach,
    us,
)
from kjo_django.exceptions import CoordinationError, CoordinationForgotError
from kjo_django.probing import answer_within

try:
    from django_redis import get_redis_connection
    from redis import ConnectionPool, Redis
    from redis.exceptions import NoScriptError, RedisError
except ModuleNotFoundError as error:
    raise ImportError(f"{error}: for Redis, pip install 'kjo-django[redis]'") from error

_DELIVERIES_KEPT = timedelta(days=1)
_SCAN_COUNT = 1000
_STARTS = "STARTS:"
"""Stands before the name of a rate."""
ESCAPING = "A password's special characters are written as %2F (/), %3F (?), %23 (#) and %40 (@)."

# A script works out the keys of the delivery counts: to send them would double what is written,
# and they share their leases' slots. Few commands too: each costs as much as a row elsewhere.

# KEYS: the leases. ARGV: length of the prefix, token, ttl and life of the counts in ms.
# Answers with nothing where all are acquired for the first time, as they nearly always are.
_CLAIM = """
local prefix = string.sub(KEYS[1], 1, ARGV[1]) .. 'DELIVERIES:'
local answers, is_plain = {}, true
for i, lease in ipairs(KEYS) do
    local deliveries = prefix .. string.sub(lease, ARGV[1] + 1)
    local acquired, count = 1, 1
    if redis.call('SET', lease, ARGV[2], 'NX', 'PX', ARGV[3]) then
        if not redis.call('SET', deliveries, 1, 'NX', 'PX', ARGV[4]) then
            count = redis.call('INCR', deliveries)
            redis.call('PEXPIRE', deliveries, ARGV[4])
        end
    else
        count = tonumber(redis.call('GET', deliveries)) or 1
        if redis.call('GET', lease) == ARGV[2] then
            redis.call('PEXPIRE', lease, ARGV[3])
        else
            acquired = 0
        end
    end
    is_plain = is_plain and acquired == 1 and count == 1
    answers[2 * i - 1] = acquired
    answers[2 * i] = count
end
return is_plain and {} or answers
"""

# KEYS: the leases. ARGV: token, ttl in ms.
_RENEW = """
local answers = {}
for i, lease in ipairs(KEYS) do
    answers[i] = 0
    if redis.call('GET', lease) == ARGV[1] then
        answers[i] = redis.call('PEXPIRE', lease, ARGV[2])
    end
end
return answers
"""

# KEYS: the leases. ARGV: length of the prefix, token, "1" to keep the counts, "2" to take one off.
_RELEASE = """
local prefix = string.sub(KEYS[1], 1, ARGV[1]) .. 'DELIVERIES:'
for _, lease in ipairs(KEYS) do
    if redis.call('GET', lease) == ARGV[2] then
        local deliveries = prefix .. string.sub(lease, ARGV[1] + 1)
        if ARGV[3] == '1' or (ARGV[3] == '2' and redis.call('DECR', deliveries) > 0) then
            redis.call('DEL', lease)
        else
            redis.call('DEL', lease, deliveries)
        end
    end
end
return #KEYS
"""


# KEYS: the rates, then the sign of life. ARGV: the sign's token ("" for none); how many of the
# rates are asked for, and not only told of: they come first; of each rate its number, and in µs its
# window, the part of it that has a counter, its interval and by how much a permit may be ahead; how
# many permits were used; of each of them its stamp, how many µs ago it was used, or "never", how
# many rates, and which; of each ask how long it lasts and how far ahead it may be in µs, the stamp
# of the permit it replaces (0 for none), how many rates, and which.
# Answers with two numbers for each ask, the wait in µs and the stamp; with nothing at all where the
# sign is missing. The server's clock is everybody's.
# It does what coordination/starts.py does, with a hash: the field "even" is the next even moment,
# each other one is the end of a part of the window, and how many start in it.
_PERMIT = (
    f"local FARTHEST = {FARTHEST}"
    + """
if ARGV[1] ~= '' and redis.call('GET', KEYS[#KEYS]) ~= ARGV[1] then
    return {}
end
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local at = 1
local function argument()
    at = at + 1
    return tonumber(ARGV[at])
end
local function text(number)
    return string.format('%.0f', number)
end
local function rates_named()
    local named = {}
    for j = 1, argument() do
        named[j] = argument()
    end
    return named
end
local function part_of(rate, stamp)
    return math.ceil(stamp / rate.part) * rate.part
end
local function count(rate, stamp, number)
    local part = part_of(rate, stamp)
    rate.parts[part] = (rate.parts[part] or 0) + number
    rate.total, rate.is_changed = rate.total + number, true
end
local function give_back(rate, stamp)
    if (rate.parts[part_of(rate, stamp)] or 0) > 0 then
        count(rate, stamp, -1)
        rate.even = rate.even - rate.interval
    end
end
local function wait_of(rate)
    local wait, over = math.max(0, rate.even - rate.ahead - now), rate.total - rate.count + 1
    if over > 0 then
        local moments = {}
        for moment in pairs(rate.parts) do
            moments[#moments + 1] = moment
        end
        table.sort(moments)
        for _, moment in ipairs(moments) do
            over = over - rate.parts[moment]
            wait = math.max(wait, moment + rate.window - now)
            if over <= 0 then
                break
            end
        end
    end
    return wait
end
local known, planned, asked = {}, {}, argument()
for i = 1, #KEYS - 1 do
    local rate = {count = argument(), window = argument(), part = argument(),
        interval = argument(), ahead = argument(), even = 0, parts = {}, gone = {}, total = 0}
    local found = redis.call('HGETALL', KEYS[i])
    for j = 1, #found, 2 do
        local field, value = found[j], tonumber(found[j + 1])
        if field == 'even' then
            local latest = now + rate.ahead + rate.interval + math.floor(rate.window / 2)
            rate.even = (i > asked or value <= latest) and value or now
        elseif i > asked then
            rate.parts[tonumber(field)] = value
            rate.total = rate.total + value
        elseif tonumber(field) > now - rate.window and value > 0
            and tonumber(field) <= now + math.max(rate.window, FARTHEST) then
            rate.parts[tonumber(field)] = value
            rate.total = rate.total + value
        else
            rate.gone[#rate.gone + 1] = field
        end
    end
    known[i] = rate
end
for _ = 1, argument() do
    local stamp, ago = argument(), argument()
    for _, name in ipairs(rates_named()) do
        local rate = known[name]
        if not ago then
            give_back(rate, stamp)
        elseif (rate.parts[part_of(rate, stamp)] or 0) > 0 then
            count(rate, stamp, -1)
            count(rate, now - ago, 1)
        end
    end
end
for i, rate in ipairs(known) do
    planned[i] = {parts = {}}
    for field, value in pairs(rate) do
        if field ~= 'parts' then
            planned[i][field] = value
        end
    end
    for moment, number in pairs(rate.parts) do
        planned[i].parts[moment] = number
    end
end
local answers = {}
while ARGV[at + 1] do
    local lasts, within, old, named = argument(), argument(), argument(), rates_named()
    local wait, waits, is_moved = 0, {}, old > 0
    for _, name in ipairs(named) do
        local rate = known[name]
        is_moved = is_moved and old > now - math.floor(rate.window / 2)
            and (rate.parts[part_of(rate, old)] or 0) > 0
    end
    for _, name in ipairs(named) do
        if old > 0 and not is_moved then
            give_back(known[name], old)
            give_back(planned[name], old)
        end
        waits[name] = wait_of(planned[name])
        wait = math.max(wait, waits[name])
    end
    if is_moved then
        wait = 0
    end
    local is_given = is_moved or wait <= within
    local stamp = now + wait + lasts
    local function take(rate)
        if is_moved then
            count(rate, old, -1)
        else
            rate.even = math.max(rate.even, now + wait) + rate.interval
        end
        count(rate, stamp, 1)
    end
    for _, name in ipairs(named) do
        if is_given then
            take(known[name])
        end
        -- Of a faster rate others start meanwhile.
        if is_given or waits[name] == wait then
            take(planned[name])
        end
    end
    answers[#answers + 1] = text(wait)
    answers[#answers + 1] = is_given and text(stamp) or '0'
end
for i, rate in ipairs(known) do
    if rate.is_changed then
        local values, latest, gone = {'even', text(rate.even)}, rate.even, rate.gone
        for moment, number in pairs(rate.parts) do
            if number > 0 then
                values[#values + 1] = text(moment)
                values[#values + 1] = number
                latest = math.max(latest, moment + rate.window)
            else
                gone[#gone + 1] = text(moment)
            end
        end
        if #gone > 0 then
            redis.call('HDEL', KEYS[i], unpack(gone))
        end
        redis.call('HSET', KEYS[i], unpack(values))
        if i <= asked then
            redis.call('PEXPIRE', KEYS[i], math.ceil((latest - now) / 1000) + 1)
        end
    end
end
return answers
"""
)

# KEYS: the names, then the sign of life. ARGV: the sign's token ("" for none), token, ttl in ms; of
# each name how many slots it has and how many are wanted.
# Answers with the numbers of the slots taken, name by name, 0 for none; nothing at all where the
# sign is missing.
_CLAIM_SLOTS = """
if ARGV[1] ~= '' and redis.call('GET', KEYS[#KEYS]) ~= ARGV[1] then
    return {}
end
local answers = {}
for i = 1, #KEYS - 1 do
    local slots, wanted = tonumber(ARGV[2 * i + 2]), tonumber(ARGV[2 * i + 3])
    local number, taken = 0, 0
    while taken < wanted do
        number = number + 1
        if number > slots then
            answers[#answers + 1] = 0
            taken = taken + 1
        elseif redis.call('SET', KEYS[i] .. ':' .. number, ARGV[2], 'NX', 'PX', ARGV[3]) then
            answers[#answers + 1] = number
            taken = taken + 1
        end
    end
end
return answers
"""


class RedisCoordination(Coordination):
    """See the module. Connections come from django-redis' pool, which notices a fork."""

    supports_wake_ups = True
    known_options = frozenset({"CACHE", "KEY_PREFIX", "URL"})

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self.cache_alias: str = self.options.get("CACHE", "default")
        self._prefix: str = self.options.get("KEY_PREFIX", "")
        self._prefix_length = len(self._prefix.encode())
        self._url: str | None = self.options.get("URL")
        # Connects to nothing, and refuses what can never be connected to.
        if not self._url:
            self._client()
            return
        try:
            pool = ConnectionPool.from_url(self._url, socket_connect_timeout=5, socket_timeout=5)
        except ValueError:
            # Without the URL, which may hold a password, or what is wrong with it, which may too.
            text = "KJO['COORDINATION']['OPTIONS']['URL'] is not a redis:// or rediss:// URL."
            raise ImproperlyConfigured(f"{text} {ESCAPING}") from None
        self._own_client = Redis(connection_pool=pool)

    # --- Leases -----------------------------------------------------------------------------------

    def claim(self, names: Sequence[str], token: str, ttl: timedelta) -> list[Claim]:
        """Take the leases with one script call: ``SET NX PX`` each."""
        if not names:
            return []
        times = _ms(ttl), _ms(_DELIVERIES_KEPT)
        answers = self._run(_CLAIM, self._keys(names), self._prefix_length, token, *times)
        if not answers:
            return [FIRST_CLAIM] * len(names)
        return [
            Claim(bool(acquired), int(deliveries))
            for acquired, deliveries in zip(answers[::2], answers[1::2], strict=True)
        ]

    def renew(self, names: Sequence[str], token: str, ttl: timedelta) -> list[bool]:
        """Extend with one script call."""
        if not names:
            return []
        return list(map(bool, self._run(_RENEW, self._keys(names), token, _ms(ttl))))

    def release(
        self,
        names: Sequence[str],
        token: str,
        *,
        count_delivery: bool = False,
        undo_claim: bool = False,
    ) -> None:
        """Compare and delete with one script call."""
        if names:
            keeps = "2" if undo_claim else "1" if count_delivery else "0"
            self._run(_RELEASE, self._keys(names), self._prefix_length, token, keeps)

    def holders(self, names: Sequence[str]) -> dict[str, str]:
        """Return the live tokens, in one MGET."""
        if not names:
            return {}
        with self._reached():
            found = self._client().mget(self._keys(names))
        pairs = zip(names, found, strict=True)
        return {name: text_of(value) for name, value in pairs if value is not None}

    def names(self, prefix: str) -> Iterator[str]:
        """Iterate with SCAN, never KEYS: a change during the iteration may be missed."""
        pattern = re.sub(r"([*?\[\]\\])", r"\\\1", self._prefix + prefix) + "*"
        hidden = len(self._prefix)
        seen: set[str] = set()
        with self._reached():
            for key in self._client().scan_iter(match=pattern, count=_SCAN_COUNT, _type="STRING"):
                name = text_of(key)[hidden:]
                if name not in seen:  # SCAN may repeat itself
                    seen.add(name)
                    yield name

    # --- Limits -----------------------------------------------------------------------------------

    supports_limits = True

    def permit(
        self,
        asks: Sequence[Ask],
        sign: tuple[str, str] | None = None,
        used: Sequence[Used] = (),
    ) -> list[Permit]:
        """Answer all with one script call, by the server's clock."""
        if not asks and not used:
            return []
        paces = paces_of(asks, used)
        lease, token = sign or ("", "")
        arguments = [token, len(paces_of(asks, ())), *_permit_arguments(paces, asks, used)]
        keys = [f"{_STARTS}{name}" for name in paces]
        answers = self._run(_PERMIT, self._keys([*keys, lease]), *arguments)
        if asks and not answers:
            raise CoordinationForgotError(f"Redis at {self._setting} has lost its data")
        numbers = [int(answer) for answer in answers]
        return [
            Permit(wait / 1e6, stamp)
            for wait, stamp in zip(numbers[::2], numbers[1::2], strict=True)
        ]

    def claim_slots(
        self,
        asks: Sequence[tuple[str, int]],
        token: str,
        ttl: timedelta,
        sign: tuple[str, str] | None = None,
    ) -> list[str]:
        """Take all with one script call."""
        if not asks:
            return []
        slots, wanted = dict(asks), Counter(name for name, _ in asks)
        lease, living = sign or ("", "")
        numbers = [part for name in slots for part in (slots[name], wanted[name])]
        keys = self._keys([*slots, lease])
        answers = self._run(_CLAIM_SLOTS, keys, living, token, _ms(ttl), *numbers)
        if not answers:
            raise CoordinationForgotError(f"Redis at {self._setting} has lost its data")
        answered = iter(answers)
        taken = {name: [int(next(answered)) for _ in range(wanted[name])] for name in slots}
        return [slot_name(name, n) if (n := taken[name].pop(0)) else "" for name, _ in asks]

    # --- Marks ------------------------------------------------------------------------------------

    def set_marks(self, marks: Mapping[str, str], ttl: timedelta) -> None:
        """Set each with its TTL, in one pipeline."""
        if not marks:
            return
        with self._reached():
            pipeline = self._client().pipeline(transaction=False)
            for name, value in marks.items():
                pipeline.set(self._prefix + name, value, px=_ms(ttl))
            pipeline.execute()

    def get_marks(self, names: Sequence[str]) -> dict[str, str]:
        """Return the live values, in one MGET, as of leases."""
        return self.holders(names)

    # --- Wake-up calls ----------------------------------------------------------------------------

    def notify(self, *channels: str) -> None:
        """PUBLISH on each, in one pipeline."""
        with self._reached():
            pipeline = self._client().pipeline(transaction=False)
            for channel in channels:
                pipeline.publish(self._prefix + channel, "")
            pipeline.execute()

    def listen(self, channels: Sequence[str]) -> RedisListener:
        """Subscribe on a connection of its own."""
        keys = {self._prefix + channel: channel for channel in channels}
        with self._reached():
            return RedisListener(f"Redis at {self._setting}", self._client, keys)

    # --- Health -----------------------------------------------------------------------------------

    def probe(self, timeout: float) -> str:
        """Ask for the version."""
        info = self._info("server", timeout)
        kind = "valkey" if info.get("server_name") == "valkey" else "redis"
        return f"{kind} {info.get(f'{kind}_version', '')} ({self._setting})"

    def memory_bytes(self, timeout: float) -> int:
        """Return the memory the server uses."""
        return int(self._info("memory", timeout)["used_memory"])

    def _info(self, section: str, timeout: float) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = answer_within(timeout, lambda: self._client().info(section))
        except ImproperlyConfigured:
            raise
        except Exception as error:
            raise CoordinationError(self._unreachable(error)) from error
        return answer

    # --- Inside -----------------------------------------------------------------------------------

    @property
    def _setting(self) -> str:
        return "its URL" if self._url else f"CACHES[{self.cache_alias!r}]"

    def _unreachable(self, error: Exception) -> str:
        return f"Redis at {self._setting} (KJO['COORDINATION']) cannot be used: {error}"

    def _client(self) -> Any:
        if self._url:
            return self._own_client
        try:
            return get_redis_connection(self.cache_alias)
        except (InvalidCacheBackendError, NotImplementedError) as error:
            raise ImproperlyConfigured(
                f"KJO['COORDINATION']['OPTIONS']['CACHE'] is {self.cache_alias!r}, but "
                f"{self._setting} is not a cache of django-redis (django_redis.cache.RedisCache)."
            ) from error
        except ValueError:
            # Without what it says: part of a password, where that has a / or ? not escaped.
            raise ImproperlyConfigured(
                f"The LOCATION of {self._setting} is not a redis:// or rediss:// URL. {ESCAPING}"
            ) from None

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except (RedisError, OSError) as error:
            raise CoordinationError(self._unreachable(error)) from error

    def _run(self, source: str, keys: list[str], *arguments: object) -> Any:
        """Run a script by its digest. A server that forgot it (restart, failover) gets it again."""
        with self._reached():
            client, what = self._client(), (len(keys), *keys, *arguments)
            try:
                return client.execute_command("EVALSHA", _digest(source), *what)
            except NoScriptError:
                return client.execute_command("EVAL", source, *what)

    def _keys(self, names: Sequence[str]) -> list[str]:
        return [self._prefix + name for name in names] if self._prefix else list(names)


def _permit_arguments(
    paces: Mapping[str, Pace], asks: Sequence[Ask], used: Sequence[Used]
) -> list[object]:
    """Return what the script is told of rates, of permits that were used, and of what is asked
    for: each names its rates by their numbers, from 1."""
    places = {name: number for number, name in enumerate(paces, start=1)}
    arguments: list[object] = []
    for pace in paces.values():
        arguments += pace.most, us(pace.seconds), part_of(pace)
        arguments += us(pace.interval), us(pace.ahead)
    arguments.append(len(used))
    for one in used:
        ago = "never" if one.ago is None else us(one.ago)
        arguments += one.stamp, ago, len(one.paces)
        arguments += [places[pace.name] for pace in one.paces]
    for ask in asks:
        arguments += us(ask.lasts), reach(ask), ask.replaces, len(ask.paces)
        arguments += [places[pace.name] for pace in ask.paces]
    return arguments


@cache
def _digest(source: str) -> str:
    """Return the name under which the server knows a script: its SHA-1."""
    return hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


def _ms(duration: timedelta) -> int:
    return max(1, round(duration.total_seconds() * 1000))


_PATIENCE = 5.0
"""Seconds for the server to confirm a subscription."""
_ASK_AFTER = 30.0
"""Seconds of silence until the server is asked whether it is there: a connection cut without a word
(a machine that died, a firewall that forgot it) looks silent for ever."""
_ANSWERS_WITHIN = 10.0


class RedisListener(ReconnectingListener):
    """Subscribes on a connection it takes from the pool.

    :param client: gives a client; asked again after an outage.
    :param channels: the names to listen for, by the channel of the server.
    """

    outages = (RedisError, OSError, ValueError)
    longest_sleep = _ANSWERS_WITHIN

    def __init__(self, server: str, client: Callable[[], Any], channels: Mapping[str, str]) -> None:
        self._client = client
        self._names = dict(channels)
        self._ask_at = self._answer_by = 0.0
        super().__init__(server, channels.values())

    def _connect(self) -> Any:
        pubsub = self._client().pubsub(ignore_subscribe_messages=True)
        try:
            pubsub.subscribe(*self._names)
            # The server's answer: from now on nothing is missed.
            deadline = time.monotonic() + _PATIENCE
            for _ in self._names:
                pubsub.get_message(timeout=max(0.0, deadline - time.monotonic()))
        except BaseException:
            self._disconnect(pubsub)
            raise
        self._is_heard()
        return pubsub

    def _is_heard(self) -> None:
        """Note that the server is there."""
        self._ask_at = time.monotonic() + _ASK_AFTER
        self._answer_by = 0.0

    def _descriptor(self, connection: Any) -> int:
        # The client has no public name for its socket, and no wait that can be ended.
        socket = connection.connection._sock
        if socket is None:
            raise OSError("the connection is closed")
        return int(socket.fileno())

    def _heard(self, connection: Any) -> set[str]:
        called: set[str] = set()
        connection.check_health()
        while connection.connection.can_read(timeout=0):
            self._is_heard()
            message = connection.get_message(timeout=0)
            if message is not None and message["channel"] is not None:
                called.add(self._names.get(text_of(message["channel"]), ""))
        called.discard("")
        # A server that has long been silent is asked for a sign of life, which has no channel.
        now = time.monotonic()
        if self._answer_by:
            if now >= self._answer_by:
                raise OSError("the server does not answer")
        elif now >= self._ask_at:
            connection.ping()
            self._answer_by = now + _ANSWERS_WITHIN
        return called

    def _disconnect(self, connection: Any) -> None:
        with suppress(RedisError, OSError):  # it is gone either way
            connection.close()


def text_of(value: bytes | str) -> str:
    """Return a name that the server sent. Our names are UTF-8; others are shown with "�"."""
    return value if isinstance(value, str) else value.decode("utf-8", "replace")
