"""The calls of the maintenance process. Every call is safe to run twice and from several processes at once."""

from __future__ import annotations

from typing import Any

from engine.bus import keys
from engine.bus.call import Call, seconds_of
from engine.bus.records import parse_fields

PAGE = 500


def clients(model: str) -> Call[dict[str, int]]:
    """API server incarnation -> requests not ended that it listens for."""

    def decode(answers: list[Any]) -> dict[str, int]:
        sums = parse_fields(answers[0])
        return {name.removeprefix("client:"): int(value) for name, value in sums.items() if name.startswith("client:")}

    return Call(decode, commands=(("HGETALL", keys.load(model)),))


def requests_of(model: str, incarnations: frozenset[str], most: int = 2000) -> Call[list[tuple[str, str]]]:
    """(id, API server) of live requests that one of these API servers listens for, oldest first, `most` at most. Those whose grace
    time runs are left out."""

    def page(start: int, found: list[tuple[str, str]]) -> Call[list[tuple[str, str]]]:
        def owners(answers: list[Any]) -> list[tuple[str, str]] | Call[list[tuple[str, str]]]:
            ids, now = [name.decode() for name in answers[0]], seconds_of(answers[1])
            if not ids:
                return found

            def choose(records: list[Any]) -> list[tuple[str, str]] | Call[list[tuple[str, str]]]:
                everything = list(found)
                for name, (client, grace, detached) in zip(ids, records, strict=True):
                    waits = detached is not None and now - float(detached) < int(grace or 0) / 1000
                    if client and client.decode() in incarnations and not waits:
                        everything.append((name, client.decode()))
                return everything[:most] if len(everything) >= most else page(start + PAGE, everything)

            return Call(choose, commands=tuple(("HMGET", keys.record(model, name), "client", "grace", "detached") for name in ids))

        return Call(owners, commands=(("ZRANGE", keys.live(model), start, start + PAGE - 1), ("TIME",)))

    return page(0, [])


def forget_records(model: str) -> Call[int]:
    """Remove ended requests whose records have expired from the index. Returns how many."""

    def page(forgotten: int) -> Call[int]:
        def look(answers: list[Any]) -> int | Call[int]:
            ids = answers[0]

            def forget(exist: list[Any]) -> int | Call[int]:
                gone = [name for name, there in zip(ids, exist, strict=True) if not there]
                if not gone:
                    return forgotten
                again = page(forgotten + len(gone)) if len(gone) == PAGE else forgotten + len(gone)
                return Call(lambda _: again, commands=(("ZREM", keys.ended(model), *gone),))

            return Call(forget, commands=tuple(("EXISTS", keys.record(model, name.decode())) for name in ids))

        return Call(look, commands=(("ZRANGE", keys.ended(model), 0, PAGE - 1),))

    return page(0)


def forget_journals(model: str) -> Call[int]:
    """Remove the journals of engines that own no slot any more and that no live record names. Returns how many.

    A dead engine's journal comes into no further record, so that records may be read page by page.
    """

    def forget(names: list[str]) -> Call[int]:
        if not names:
            return Call(lambda _: 0)
        commands = (("DEL", *(keys.journal(model, name) for name in names)), ("SREM", keys.journals(model), *names))
        return Call(lambda _: len(names), commands=commands)

    def look(answers: list[Any]) -> int | Call[int]:
        names = sorted(name.decode() for name in answers[0])

        def judge(owners: list[Any]) -> int | Call[int]:
            owned = [owner.decode() if owner else "" for owner in owners]
            dead = [name for name, owner in zip(names, owned, strict=True) if name.partition(":")[2] != owner]
            if not dead:
                return 0
            return _named_journals(model).then(lambda named: forget(sorted({*dead} - named)))

        if not names:
            return 0
        return Call(judge, commands=tuple(("GET", keys.owner(model, name.partition(":")[0])) for name in names))

    return Call(look, commands=(("SMEMBERS", keys.journals(model)),))


def _named_journals(model: str, start: int = 0, found: frozenset[str] = frozenset()) -> Call[frozenset[str]]:
    """The journals that live records name, behind the first `start` records."""

    def page(answers: list[Any]) -> frozenset[str] | Call[frozenset[str]]:
        ids = [name.decode() for name in answers[0]]
        if not ids:
            return found

        def gather(values: list[Any]) -> Call[frozenset[str]]:
            named = {name for value in values if value for name in value.decode().split()}
            return _named_journals(model, start + PAGE, found | named)

        return Call(gather, commands=tuple(("HGET", keys.record(model, name), "journals") for name in ids))

    return Call(page, commands=(("ZRANGE", keys.live(model), start, start + PAGE - 1),))


def forget_api_servers(silence: float) -> Call[int]:
    """Remove API servers without a heartbeat, last heard of more than `silence` seconds ago, from the index. Returns how many."""

    def look(answers: list[Any]) -> Call[int]:
        names = [name.decode() for name in answers[0]]

        def forget(exist: list[Any]) -> int | Call[int]:
            gone = [name for name, there in zip(names, exist, strict=True) if not there]
            if not gone:
                return 0
            return Call(lambda counts: int(counts[0]), commands=(("ZREM", keys.apis(), *gone),))

        return Call(forget, commands=tuple(("EXISTS", keys.api(name)) for name in names))

    def list_old(answers: list[Any]) -> Call[int]:
        before = seconds_of(answers[0]) - silence
        return Call(look, commands=(("ZRANGEBYSCORE", keys.apis(), "-inf", before, "LIMIT", 0, PAGE),))

    return Call(list_old, commands=(("TIME",),))
