"""Signs of life of engines and API servers, keys with a time to live, and the observer that may declare an engine dead."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Collection
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from engine.bus import keys
from engine.bus.call import Call, UnfitRedis, milliseconds, script, seconds_of
from engine.protocol import EngineInfo, decode_info, encode

logger = logging.getLogger(__name__)

LOOKS_APART = 15.0  # seconds after which a first look at a missing heartbeat counts no more
SLOT_TTL = 2.0  # seconds that a slot outlives its last heartbeat
BEAT_INTERVAL = 0.5  # seconds
API_TTL = 3.0
FAILOVER_TIMEOUT = 60.0  # seconds that requests wait for an engine after the last one died
OLDEST_REDIS = (7, 0)  # the first with `#!lua` scripts, whose flags tell what may run when memory is short
_INFO = ("INFO", "server")


class ClaimedSlot(NamedTuple):
    slot: str
    incarnation: int


def check_server() -> Call[None]:
    """Raises UnfitRedis. `claim_slot` and `announce_api` check it too."""
    return Call(lambda answers: _check_version(answers[0]), commands=(_INFO,))


def _check_version(info: bytes) -> None:
    """`info`: the server section of INFO. A Valkey tells the version of Redis that it is compatible with."""
    found = re.search(rb"redis_version:((\d+)\.(\d+)[^\r\n]*)", info)
    if found is not None and (int(found[2]), int(found[3])) < OLDEST_REDIS:
        oldest = ".".join(map(str, OLDEST_REDIS))
        raise UnfitRedis(f"the server is Redis {found[1].decode()}; Redis {oldest} or newer is needed, or Valkey")


def claim_slot(
    model: str, info: EngineInfo, ttl: float = SLOT_TTL, wanted: int = 0, failover_timeout: float = FAILOVER_TIMEOUT
) -> Call[ClaimedSlot]:
    """The slot `wanted`, or the lowest free one where that is owned, under a new incarnation that is higher than all before.

    `info`'s slot and incarnation are filled in. Raises UnfitRedis.
    """

    def claimed(answer: list[Any]) -> Call[ClaimedSlot]:
        got = ClaimedSlot(answer[0].decode(), int(answer[1]))
        filled = msgspec.structs.replace(info, slot=got.slot, incarnation=got.incarnation)
        first_beat = beat(model, got.slot, got.incarnation, filled, ttl, failover_timeout)
        return first_beat.then(lambda clock: Call(lambda _: got))

    claim: Call[ClaimedSlot] = Call(
        claimed,
        script("claim", "incarnation"),
        (
            keys.slots(model),
            keys.incarnation(model),
            keys.owner(model),
            keys.slot(model),
            keys.slot_claim(model),
            keys.progress(model),
            keys.journals(model),
        ),
        (secrets.token_hex(8), milliseconds(ttl), wanted),
    )

    def fit(answers: list[Any]) -> Call[ClaimedSlot]:
        _check_version(answers[0])
        return claim

    return Call(fit, commands=(_INFO, ("SADD", keys.models(), model)))


def beat(
    model: str,
    slot: str,
    incarnation: int,
    info: EngineInfo,
    ttl: float = SLOT_TTL,
    failover_timeout: float = FAILOVER_TIMEOUT,
) -> Call[float]:
    """The heartbeat: every BEAT_INTERVAL, from a loop that makes progress. Answers Redis' clock (epoch seconds). Raises Fenced,
    Unowned.

    It names the model, slot and journal again in the lists by which others find them.
    """
    beat: Call[float] = Call(
        seconds_of,
        script("beat"),
        (
            keys.owner(model, slot),
            keys.slot(model, slot),
            keys.slot_info(model, slot),
            keys.served(model),
            keys.served_by(model, info.fingerprint),
            keys.last_engine(model),
            keys.slots(model),
            keys.journals(model),
        ),
        (incarnation, milliseconds(ttl), encode(info), milliseconds(failover_timeout), slot),
    )
    return Call(lambda answer: beat, script("name_model"), (keys.models(),), (model,))


def reclaim_slot(model: str, slot: str, incarnation: int, ttl: float = SLOT_TTL) -> Call[None]:
    """Own the slot again after a wipe of Redis, under the same incarnation. Raises Fenced: a later engine has claimed it."""
    reclaim: Call[None] = Call(
        lambda answer: None,
        script("reclaim"),
        (keys.owner(model, slot), keys.slot(model, slot), keys.slots(model), keys.incarnation(model), keys.journals(model)),
        (incarnation, slot, milliseconds(ttl)),
    )
    return Call(lambda answers: reclaim, commands=(("SADD", keys.models(), model),))


def models() -> Call[list[str]]:
    """Every model that had an engine, by name."""
    return Call(lambda answers: sorted(name.decode() for name in answers[0]), commands=(("SMEMBERS", keys.models()),))


def engines(model: str) -> Call[list[EngineInfo]]:
    """The living engines of a model, by slot."""

    def decode(answers: list[Any]) -> list[EngineInfo]:
        infos = [_readable(model, payload) for payload in answers if payload is not None]
        return [info for info in infos if info is not None]

    def slots(answers: list[Any]) -> list[EngineInfo] | Call[list[EngineInfo]]:
        numbers = sorted((name.decode() for name in answers[0]), key=int)
        return Call(decode, commands=tuple(("GET", keys.slot_info(model, number)) for number in numbers))

    return Call(slots, commands=(("SMEMBERS", keys.slots(model)),))


def last_engine(model: str) -> Call[EngineInfo | None]:
    """The engine that was heard of last, if that was within the failover time: requests may wait for the next one."""
    return Call(
        lambda answers: _readable(model, answers[0]) if answers[0] is not None else None,
        commands=(("GET", keys.last_engine(model)),),
    )


@lru_cache(maxsize=64)
def _told_once(message: str) -> None:
    logger.error("%s", message)


def _readable(model: str, payload: bytes) -> EngineInfo | None:
    """None for what cannot be read: one engine's odd announcement must not hide the others."""
    try:
        return decode_info(payload)
    except msgspec.DecodeError as error:
        _told_once(f"an engine of {model} announces itself in a way that cannot be read: {error}")
        return None


# API servers.


def announce_api(ttl: float = API_TTL) -> Call[str]:
    """A new API server incarnation, known to Redis from now on; the name of its channel and of its heartbeat. Raises UnfitRedis."""

    def choose(answers: list[Any]) -> Call[str]:
        _check_version(answers[0])
        seconds, microseconds = (int(part) for part in answers[1])
        incarnation = str(seconds * 1_000_000 + microseconds)

        def chosen(results: list[Any]) -> str | Call[str]:
            return incarnation if results[0] is not None else announce_api(ttl)

        commands = (
            ("SET", keys.api(incarnation), b"", "NX", "PX", milliseconds(ttl)),
            ("ZADD", keys.apis(), seconds, incarnation),
        )
        return Call(chosen, commands=commands, transaction=True)

    return Call(choose, commands=(_INFO, ("TIME",)))


def beat_api(incarnation: str, ttl: float = API_TTL) -> Call[None]:
    return Call(
        lambda _: None,
        script("beat_api"),
        (keys.api(incarnation), keys.apis()),
        (milliseconds(ttl), incarnation),
    )


def release_api(incarnation: str) -> Call[None]:
    commands = (("DEL", keys.api(incarnation)), ("ZREM", keys.apis(), incarnation))
    return Call(lambda answers: None, commands=commands, transaction=True)


# Death.


def _absent(heartbeat: str, marker: str, ttl: float) -> Call[bool]:
    return Call(bool, script("absent"), (heartbeat, marker), (milliseconds(ttl), milliseconds(LOOKS_APART)))


def living_apis(incarnations: Collection[str]) -> Call[frozenset[str]]:
    """Those of the API servers whose heartbeat stands."""
    asked = [incarnation for incarnation in incarnations if incarnation]

    def decode(answers: list[Any]) -> frozenset[str]:
        return frozenset(incarnation for incarnation, there in zip(asked, answers, strict=True) if there)

    return Call(decode, commands=tuple(("EXISTS", keys.api(incarnation)) for incarnation in asked))


def api_absent(incarnation: str, ttl: float = API_TTL) -> Call[bool]:
    """Whether an API server's heartbeat was missing at two looks at least `ttl` apart, Redis not restarted between.

    Looks may be those of different processes: Redis remembers the first.
    """
    return _absent(keys.api(incarnation), keys.absent_api(incarnation), ttl)


class DeadEngine(NamedTuple):
    slot: str
    incarnation: int  # this one and those before it


def dead_engines(model: str, ttl: float = SLOT_TTL) -> Call[list[DeadEngine]]:
    """Engines that died: a slot's owner is without a heartbeat at two looks at least `ttl` apart, as in `api_absent`.

    They are named again at each look until `takeover` has made their slot vacant and all their requests orphans.
    """

    def look(answers: list[Any]) -> Call[list[DeadEngine]]:
        numbers, summary = answers
        slots = sorted((name.decode() for name in numbers), key=int)
        consumers = () if isinstance(summary, Exception) else summary[3] or ()  # an error: there is no stream yet
        busy = {keys.slot_of_consumer(consumer.decode()) for consumer, _ in consumers}

        def judge(values: list[Any]) -> Call[list[DeadEngine]]:
            half = len(slots)
            owned = {slot: owner.decode() for slot, owner in zip(slots, values[:half], strict=True) if owner is not None}
            heard = {slot for slot, value in zip(slots, values[half:], strict=True) if value is not None}
            vacant = [slot for slot, owner in owned.items() if not owner.isdecimal() and slot in busy]
            silent = [(slot, int(owner)) for slot, owner in owned.items() if owner.isdecimal() and slot not in heard]
            return confirm(silent, [DeadEngine(slot, int(owned[slot].split()[0])) for slot in vacant])

        reads = [*(keys.owner(model, slot) for slot in slots), *(keys.slot(model, slot) for slot in slots)]
        return Call(judge, commands=tuple(("GET", key) for key in reads))

    def confirm(silent: list[tuple[str, int]], dead: list[DeadEngine]) -> Call[list[DeadEngine]]:
        if not silent:
            return Call(lambda answers: dead)
        (slot, incarnation), *others = silent
        looked = _absent(keys.slot(model, slot), keys.absent_engine(model, slot), ttl)
        return looked.then(lambda absent: confirm(others, [*dead, DeadEngine(slot, incarnation)] if absent else dead))

    commands = (("SMEMBERS", keys.slots(model)), ("XPENDING", keys.requests(model), keys.GROUP))
    return Call(look, commands=commands, keep_errors=True)
