"""Requests with a grammar wait until the workers have compiled it, and hold up nobody; a bad grammar ends its request alone."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

from engine.client.client import AsyncClient
from engine.protocol import Abort, EngineCoreRequest, FinishReason
from engine.runtime.core import EngineCore
from engine.runtime.intake import Arrival
from tests.engine.conftest import RunningEngine
from tests.engine.runtime.engine_life import Life, arrive, assert_same_output, make_source
from tests.engine.runtime.null_requests import add, make_request, settled

PROMPT = range(300, 340)


def arrive_with_grammar(core: EngineCore, source: EngineCoreRequest) -> tuple[Arrival, Future[str]]:
    compiled: Future[str] = Future()
    return replace(arrive(core, source), grammar=compiled), compiled


def test_a_request_waits_for_its_grammar_and_others_run(core: EngineCore) -> None:
    held, free = make_source("held", PROMPT, handle=1, max_tokens=6), make_source("free", PROMPT, handle=2, max_tokens=6)
    calm = Life(core).run(arrive(core, held))
    life = Life(core)
    arrival, compiled = arrive_with_grammar(core, held)
    life.run(arrival, arrive(core, free))
    assert life.stored.keys() == {"free"}
    assert life.loop.intake.num_admitted == 1
    compiled.set_result("")
    life.run()
    assert_same_output(life.stored["held"], calm.stored["held"])
    assert life.loop.intake.num_admitted == 2


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone(core: EngineCore) -> None:
    life = Life(core)
    source = make_source("held", PROMPT, n=2, max_tokens=6)
    arrival, compiled = arrive_with_grammar(core, source)
    compiled.set_result("Invalid request: no such token")
    life.run(arrival, arrive(core, make_source("free", PROMPT, handle=2, max_tokens=6)))
    assert [(choice.reason, choice.error) for choice in life.stored["held"].choices] == 2 * [
        (FinishReason.ERROR, "Invalid request: no such token")
    ]
    assert life.stored["free"].choices[0].reason is FinishReason.LENGTH


def test_an_abort_before_it_is_compiled_is_obeyed(core: EngineCore) -> None:
    life = Life(core)
    arrival, compiled = arrive_with_grammar(core, make_source("held", PROMPT, max_tokens=6))
    life.run(arrival, Abort("held"))
    assert not life.stored
    compiled.set_result("")
    life.run()
    assert life.stored["held"].choices[0].reason is FinishReason.ABORT
    assert not life.messages[-1].token_ids


async def test_the_workers_are_asked(engine: RunningEngine, client: AsyncClient) -> None:
    """The null model has no tokenizer."""
    (held,), (free,) = await add(client, make_request(client, grammar="start: /x/")), await add(client, make_request(client))
    _, ends = await held.whole()
    assert ends[0].reason is FinishReason.ERROR and "no tokenizer" in (ends[0].error or "")
    _, ends = await free.whole()
    assert ends[0].reason is FinishReason.LENGTH
    await settled(engine)
