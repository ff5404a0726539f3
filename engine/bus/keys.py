"""Every Redis key and channel of headrace. No other file spells one.

All keys of one model carry the hash tag `{model}`, so that one script may touch them all, on a cluster too. Scripts that meet ids
only while they run (a record, an external id) get the prefix of such keys and append the id.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

GROUP = "engines"  # the consumer group of every requests stream


@lru_cache(maxsize=64)
def _tag(model: str) -> str:
    """The model's name between braces. A brace inside it would end the hash tag early."""
    return "{" + model.replace("%", "%25").replace("{", "%7B").replace("}", "%7D") + "}"


def _of(model: str, name: str) -> str:
    return f"headrace:{_tag(model)}:{name}"


# The ledger of requests.


def requests(model: str) -> str:
    """Stream: one entry a request that has not ended, fields `id` and `payload`. Its pending list has the owner of each."""
    return _of(model, "requests")


def order(model: str) -> str:
    """Sorted set of what waits: entry id with its sequence number padded -> priority and virtual start, as one number. Its minimum
    is taken next."""
    return _of(model, "order")


def live(model: str) -> str:
    """Sorted set: id of each request that has not ended -> epoch seconds of its enqueue."""
    return _of(model, "live")


def ended(model: str) -> str:
    """Sorted set: id of each ended request whose record is kept -> epoch seconds of its end."""
    return _of(model, "ended")


def load(model: str) -> str:
    """Hash of sums: `requests` (choices not ended), `waiting` (choices that no engine has) and `tokens` (prompt tokens that wait),
    each also as `<name>:<tenant>`; `orphans` (choices that wait and whose engine died);
    `client:<incarnation>` (requests not ended that an API server listens for); `kept` (bytes of ended requests' outputs). Sums of
    nothing are absent."""
    return _of(model, "load")


def record(model: str, request_id: str = "") -> str:
    """Hash: the record of a request. Without an id: the prefix."""
    return _of(model, f"record:{request_id}")


def external(model: str, external_id: str = "") -> str:
    """Sorted set: internal ids under one client-given id -> epoch seconds of their enqueue. Without an id: the prefix."""
    return _of(model, f"external:{external_id}")


def tombstone(model: str, request_id: str = "") -> str:
    """String with a time to live: an abort that came before its request. Without an id: the prefix."""
    return _of(model, f"tombstone:{request_id}")


def idempotency(model: str, tenant: str, key: str) -> str:
    """String: `<hash of the body> <request id>` of the request that a tenant sent with this Idempotency-Key."""
    digest = hashlib.sha256(f"{tenant}\0{key}".encode()).hexdigest()[:32]
    return _of(model, f"idempotency:{digest}")


def usage(model: str) -> str:
    """Stream: one line a request that ended and was not counted yet."""
    return _of(model, "usage")


def usage_days(model: str) -> str:
    """Set: the days (days since 1970-01-01, UTC) that have a hash of usage."""
    return _of(model, "usage:days")


def usage_day(model: str, day: int | str = "") -> str:
    """Hash: a day's usage, `<column>:<tenant>` -> sum; columns are `requests`, each reason of ending, and the kinds of tokens.
    Without a day: the prefix."""
    return _of(model, f"usage:day:{day}")


def resume(model: str, fingerprint: str = "") -> str:
    """Sorted set, as `order`: orphans, which an engine of this fingerprint takes before all others. Without one: the prefix."""
    return _of(model, f"resume:{fingerprint}")


def orphans(model: str) -> str:
    """Sorted set: id of each request whose engine died and that waits for the next -> epoch seconds since when."""
    return _of(model, "orphans")


def output(model: str, request_id: str = "") -> str:
    """List: the output of a running request, as far as checkpoints took it out of journals: EngineCoreOutputs of this request
    alone. Without an id: the prefix."""
    return _of(model, f"output:{request_id}")


def kept(model: str) -> str:
    """List: `<bytes> <id>` of ended requests whose records hold an output, in the order of their ends."""
    return _of(model, "kept")


def externals(model: str) -> str:
    """Hash, of client-given ids with requests that have not ended: `live:<id>`, how many; `last:<id>`, epoch milliseconds at which
    the last record of those that ended goes."""
    return _of(model, "externals")


def fair(model: str) -> str:
    """Hash of fair queueing, in tokens of virtual time: `clock`; of each tenant `finish:<tenant>` (where its next request begins),
    `last:<tenant>` (where its last one began), `mean:<tenant>` (tokens of an output of late), `weight:<tenant>`;
    `newest` (the tenant that sent a request last) and `changed` (epoch seconds at which that last became another one)."""
    return _of(model, "fair")


def staged(model: str) -> str:
    """Sorted set: entry of each request whose list is not enqueued yet -> epoch seconds at which it came."""
    return _of(model, "staged")


def heights(model: str) -> str:
    """Sorted set: slot -> choices that its engine has in flight. Slots of none are absent."""
    return _of(model, "heights")


def deadlines(model: str) -> str:
    """Sorted set: id of each request that has a deadline -> epoch seconds, of waiting while it waits."""
    return _of(model, "deadlines")


def takers(model: str) -> str:
    """Sorted set: slot -> choices in flight, of each engine that may take more. Those without places come behind the others: they
    have 2^20 added (lua/takers.lua). Each `take` writes its slot's anew."""
    return _of(model, "takers")


@lru_cache(maxsize=64)
def ledger(model: str) -> tuple[str, ...]:
    """KEYS 1-18 of every script that moves requests, in the order of lua/ledger.lua."""
    return (
        requests(model),
        order(model),
        live(model),
        ended(model),
        load(model),
        usage(model),
        record(model),
        external(model),
        tombstone(model),
        resume(model),
        orphans(model),
        output(model),
        kept(model),
        externals(model),
        fair(model),
        heights(model),
        deadlines(model),
        takers(model),
    )


# Engines.


def slots(model: str) -> str:
    """Set: every slot number that ever was claimed."""
    return _of(model, "slots")


def owner(model: str, slot: str = "") -> str:
    """String without expiry: the incarnation that may write for the slot; `<incarnation> vacant` after a takeover. Absent: no
    engine has claimed it since Redis was empty. Without a slot: the prefix."""
    return _of(model, f"owner:{slot}")


def slot(model: str, slot: str = "") -> str:
    """String with a time to live: the incarnation of the engine whose heartbeat was heard last. Without a slot: the prefix."""
    return _of(model, f"slot:{slot}")


def slot_info(model: str, slot: str) -> str:
    """String with the same time to live: EngineInfo."""
    return _of(model, f"slot:{slot}:info")


def served(model: str) -> str:
    """String whose time to live is the failover time: an engine of the model lived so lately that requests may wait for the
    next."""
    return _of(model, "served")


def served_by(model: str, fingerprint: str = "") -> str:
    """As `served`, of engines of one fingerprint. Without one: the prefix."""
    return _of(model, f"served:{fingerprint}")


def last_engine(model: str) -> str:
    """String with the same time to live: EngineInfo of the engine that was heard of last."""
    return _of(model, "engine")


def absent_engine(model: str, slot: str) -> str:
    """String with a time to live: Redis' run id, and when an observer first saw the slot empty while its consumer had entries."""
    return _of(model, f"absent:{slot}")


def slot_claim(model: str, slot: str = "") -> str:
    """String: the nonce of the claim that got the slot, so that a claim may be sent twice. Without a slot: the prefix."""
    return _of(model, f"claim:{slot}")


def incarnation(model: str) -> str:
    """String: the last incarnation given to an engine of the model; each is higher than all before."""
    return _of(model, "incarnation")


def progress(model: str, slot: str = "") -> str:
    """Hash: number and entries of the last `take` of the slot's owner, and the number of its last flush. Without a slot: the
    prefix."""
    return _of(model, f"progress:{slot}")


def shares(model: str) -> str:
    """Hash: slot -> what its engine said at its last `take`: incarnation, how many more choices it could run, tokens that its KV
    cache has room for."""
    return _of(model, "shares")


def asked(model: str) -> str:
    """Sorted set: slot -> Redis' clock in ms at its engine's last `take`."""
    return _of(model, "asked")


def journals(model: str) -> str:
    """Set: the names of all journals that may exist; maintenance removes those of dead engines that no record needs."""
    return _of(model, "journals")


def journal(model: str, name: str) -> str:
    """Stream of one engine incarnation, `<slot>:<incarnation>`, with ids `<flush number>-0`: a field an API server, the bytes
    published to it."""
    return _of(model, f"journal:{name}")


def control(model: str, slot: str = "") -> str:
    """Stream: commands to the engine of a slot, fields `incarnation` and `command`. Without a slot: the prefix."""
    return _of(model, f"control:{slot}")


def consumer(slot: str = "") -> str:
    """The consumer name of a slot in the group. Without a slot: the prefix."""
    return f"engine-{slot}"


def slot_of_consumer(consumer: str) -> str:
    return consumer.removeprefix("engine-")


def alarms(model: str) -> str:
    """Hash: kind of a watchdog's alarm -> engines that ended so."""
    return _of(model, "alarms")


def tokenizer(model: str, content_hash: str) -> str:
    """String: TokenizerBundle."""
    return _of(model, f"tokenizer:{content_hash}")


# Over all models.


def models() -> str:
    """Set: the name of every model that had an engine."""
    return "headrace:models"


def api(incarnation: str) -> str:
    """String with a time to live, empty: a living API server."""
    return f"headrace:api:{{{incarnation}}}"


def apis() -> str:
    """Sorted set: API server incarnations -> epoch seconds of the last heartbeat."""
    return "headrace:apis"


def absent_api(incarnation: str) -> str:
    """String with a time to live: Redis' run id, and when maintenance first saw the API server's key missing."""
    return f"headrace:absent:api:{{{incarnation}}}"


# Channels of pub/sub. They are no keys: nothing is stored, and database numbers do not part them.


def client_channel(incarnation: str = "") -> str:
    """Where an API server incarnation listens for ClientMessages. Without one: the prefix."""
    return f"headrace:client:{incarnation}"


def wake_channel(model: str, slot: str = "") -> str:
    """The slot's engine should take what waits. A hint: the order set is the truth. Without a slot: the prefix."""
    return _of(model, f"take:{slot}")


def control_channel(model: str, slot: str = "") -> str:
    """A command was put on the slot's control stream. A hint too. Without a slot: the prefix."""
    return _of(model, f"wake:{slot}")
