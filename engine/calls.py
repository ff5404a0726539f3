"""The calls of API servers, engines and operators by one name: `calls.enqueue`, `calls.take`, ... A call is a value; a Bus or an
AsyncBus runs it. What only upkeep asks for is in engine/upkeep.py and engine/usage.py.

Each one that changes state is one script or one transaction, and safe to send twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine import keys
from engine.admission import AdmissionLimits as AdmissionLimits
from engine.admission import Enqueued as Enqueued
from engine.admission import Refused as Refused
from engine.admission import RequestFacts as RequestFacts
from engine.admission import enqueue as enqueue
from engine.control import ControlBatch as ControlBatch
from engine.control import control as control
from engine.control import publish as publish
from engine.control import read_control as read_control
from engine.ledger import EndedRequest as EndedRequest
from engine.ledger import FinishOutcome as FinishOutcome
from engine.ledger import Taken as Taken
from engine.ledger import bury as bury
from engine.ledger import finish as finish
from engine.ledger import flush as flush
from engine.ledger import reject as reject
from engine.ledger import take as take
from engine.liveness import ClaimedSlot as ClaimedSlot
from engine.liveness import DeadEngine as DeadEngine
from engine.liveness import DeathWatch as DeathWatch
from engine.liveness import Observation as Observation
from engine.liveness import announce_api as announce_api
from engine.liveness import beat as beat
from engine.liveness import beat_api as beat_api
from engine.liveness import claim_slot as claim_slot
from engine.liveness import engines as engines
from engine.liveness import models as models
from engine.liveness import observe as observe
from engine.liveness import release_api as release_api
from engine.liveness import release_slot as release_slot
from engine.protocol import TokenizerBundle, decode_bundle, encode
from engine.records import RecordView as RecordView
from engine.records import ended_requests as ended_requests
from engine.records import find as find
from engine.records import live_requests as live_requests
from engine.records import record as record
from engine.records import stored_output as stored_output
from engine.scripts import BusUnavailable as BusUnavailable
from engine.scripts import Call as Call
from engine.scripts import Fenced as Fenced


def put_tokenizer(model: str, content_hash: str, bundle: TokenizerBundle) -> Call[None]:
    return Call(lambda answers: None, commands=(("SET", keys.tokenizer(model, content_hash), encode(bundle)),))


def get_tokenizer(model: str, content_hash: str) -> Call[TokenizerBundle | None]:
    return Call(
        lambda answers: None if answers[0] is None else decode_bundle(answers[0]),
        commands=(("GET", keys.tokenizer(model, content_hash)),),
    )


@dataclass(frozen=True)
class QueueDepth:
    queued: int  # requests that wait
    queued_tokens: int  # their prompt tokens
    live: int  # requests that wait or run
    choices: int  # their choices


def queue_depth(model: str) -> Call[QueueDepth]:
    def decode(answers: list[Any]) -> QueueDepth:
        choices, tokens = answers[2]
        return QueueDepth(int(answers[0]), int(tokens or 0), int(answers[1]), int(choices or 0))

    commands = (
        ("ZCARD", keys.order(model)),
        ("ZCARD", keys.live(model)),
        ("HMGET", keys.load(model), "requests", "tokens"),
    )
    return Call(decode, commands=commands, transaction=True)
