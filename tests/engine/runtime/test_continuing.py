"""An engine goes on with a request that another engine died with: the answer is the one of a calm run, whole and once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from engine.llm import LLM
from engine.protocol import Abort, FinishReason, Lack, Replay, RequestTimes, decode_column
from engine.runtime.core import EngineCore
from engine.runtime.folding import FoldedOutput, fold
from tests.engine.runtime.engine_life import (
    CLIENT,
    Life,
    arrive,
    assert_same_output,
    fold_life,
    make_source,
    tokens_of,
)

PROMPT = range(300, 340)


@pytest.mark.parametrize("keep_ends", [True, False])
@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": 6},
        {"max_tokens": 5, "n": 3, "logprobs": 1},
        {"max_tokens": 4, "n": 2, "prompt_logprobs": 0, "logprobs": 0},
        {"max_tokens": 0, "prompt_logprobs": 1},
    ],
)
def test_a_run_cut_at_any_message_goes_on_as_if_it_had_not_been(
    core: EngineCore, sampling: dict[str, int], keep_ends: bool
) -> None:
    source = make_source("r", PROMPT, **sampling)
    calm = Life(core).run(arrive(core, source))
    for cut in range(len(calm.messages) + 1):
        folded = fold_life(calm, source, cut, keep_ends)
        second = Life(core, incarnation=2).run(arrive(core, source, folded))
        assert_same_output(second.stored["r"], calm.stored["r"])
        told = [(CLIENT, message) for message in calm.messages[:cut] + second.messages]
        whole = fold(source, told, [(CLIENT, source.handle)])
        assert [choice.token_ids.tolist() for choice in whole.choices] == tokens_of(calm.stored["r"]) or not sampling["max_tokens"]
        assert all(choice.end is not None for choice in whole.choices)
        num_folded = [len(choice.token_ids) for choice in folded.choices]
        offsets = [row for message in second.messages for row in zip(*_columns(message.choices, message.offsets), strict=True)]
        assert all(offset >= num_folded[choice] for choice, offset in offsets), "a token was sampled again"
        assert len(offsets) == second.num_sampled
        assert ("r" in second.times) == (num_folded[0] == 0 and folded.choices[0].end is None)


def _columns(*columns: bytes) -> list[list[int]]:
    return [decode_column(column).tolist() for column in columns]


def test_times_and_cached_tokens_of_the_first_engine_survive(core: EngineCore) -> None:
    source = make_source("r", PROMPT, max_tokens=4)
    Life(core).run(arrive(core, make_source("warm", PROMPT, max_tokens=1)))
    calm = Life(core).run(arrive(core, source))
    assert calm.stored["r"].num_cached_tokens == 32
    assert core.scheduler.reset_prefix_cache()
    began = calm.times["r"]
    folded = fold(source, [(CLIENT, message) for message in calm.messages[:2]], [(CLIENT, 1)], 32, began)
    stored = Life(core).run(arrive(core, source, folded)).stored["r"]
    times = stored.times
    assert (times.received, times.scheduled, times.first_token) == (began.received, began.scheduled, began.first_token)
    assert began.first_token <= times.last_token <= times.finished and times.num_preemptions == 0
    assert stored.num_cached_tokens == 32


def test_a_choice_that_had_ended_tells_its_end_again_and_is_not_counted_again(core: EngineCore) -> None:
    source = make_source("r", PROMPT, n=2, max_tokens=3)
    calm = Life(core).run(arrive(core, source))
    folded = fold_life(calm, source, len(calm.messages))
    before = dict(core.stats().finished)
    second = Life(core).run(arrive(core, source, folded))
    assert second.num_sampled == 0 and core.stats().finished == before
    ends = [end for message in second.messages for end in message.finished]
    assert ends == [end for message in calm.messages for end in message.finished]
    assert second.stored == calm.stored


def test_ordered_ends_are_obeyed_before_a_token_is_sampled(core: EngineCore) -> None:
    source = make_source("r", PROMPT, n=3, max_tokens=6)
    calm = Life(core).run(arrive(core, source))
    folded = fold_life(calm, source, len(calm.messages), keep_ends=False)  # an ordered end comes before one that sampling finds
    folded.choices[2].token_ids = folded.choices[2].token_ids[:3]
    orders = (Abort("r", 0, FinishReason.STOP, 2, "END"), Abort("r", 1))
    second = Life(core).run(arrive(core, source, folded, *orders))
    stored, tokens = second.stored["r"], tokens_of(calm.stored["r"])
    assert tokens_of(stored) == [tokens[0][:2], tokens[1], tokens[2]]
    assert [(choice.reason, choice.stop_reason) for choice in stored.choices] == [
        (FinishReason.STOP, "END"),
        (FinishReason.ABORT, None),
        (FinishReason.LENGTH, None),
    ]
    assert second.num_sampled == 3


def test_a_stop_string_behind_lost_tokens_ends_the_output_there_again(core: EngineCore) -> None:
    """Ordered, or obeyed already."""
    source = make_source("r", PROMPT, n=2, max_tokens=6, logprobs=0)
    life = Life(core)
    life.loop.inbox.put(arrive(core, source))
    life.loop._take_in()
    for _ in range(5):  # of them two for the prompt
        if outputs := core.step():
            life.loop._give_out(outputs)
    order = Abort("r", 0, FinishReason.STOP, 3, "END")
    life.loop.inbox.put(order)
    life.loop._take_in()
    calm = life.run()
    expected = tokens_of(calm.stored["r"])
    assert [len(tokens) for tokens in expected] == [3, 6]
    for lost in (1, 2, 3):
        folded = fold_life(calm, source, len(calm.messages))
        assert folded.choices[0].end is not None and folded.choices[0].end.stop_reason == "END"
        orders = ()
        for choice in folded.choices:
            choice.token_ids, choice.logprobs = choice.token_ids[:-lost], choice.logprobs[:-lost]
        folded.choices[1].end = None
        if lost == 2:
            folded.choices[0].end, orders = None, (order,)
        second = Life(core).run(arrive(core, source, folded, *orders))
        assert second.num_sampled == 2 * lost
        assert_same_output(second.stored["r"], calm.stored["r"])


def test_an_order_for_all_choices_ends_a_request_of_which_nothing_is_known(core: EngineCore) -> None:
    source = make_source("r", PROMPT, n=2, max_tokens=6)
    folded = fold(source, [], [(CLIENT, 1)])
    second = Life(core).run(arrive(core, source, folded, Abort("r", reply_to=CLIENT, token="t")))
    assert tokens_of(second.stored["r"]) == [[], []] and second.num_sampled == 0
    assert all(choice.reason is FinishReason.ABORT for choice in second.stored["r"].choices)


def test_every_order_of_aborts_that_came_early_counts(core: EngineCore) -> None:
    life = Life(core)
    for choice in (0, 2):
        life.loop.inbox.put(Abort("r", choice))
    stored = life.run(arrive(core, make_source("r", PROMPT, n=3, max_tokens=4))).stored["r"]
    assert [choice.reason for choice in stored.choices] == [FinishReason.ABORT, FinishReason.LENGTH, FinishReason.ABORT]


def test_tokens_that_fill_the_context_end_the_request(core: EngineCore) -> None:
    """Another engine may have had a longer context."""
    source = make_source("r", range(300, 810), max_tokens=200)
    calm = Life(core).run(arrive(core, source))
    assert len(tokens_of(calm.stored["r"])[0]) == 2
    for count in (2, 150):
        folded = FoldedOutput(fold_life(calm, source, len(calm.messages), keep_ends=False).choices)
        folded.choices[0].token_ids = np.resize(folded.choices[0].token_ids, count)
        second = Life(core).run(arrive(core, source, folded))
        assert second.num_sampled == 0 and len(tokens_of(second.stored["r"])[0]) == count
        assert second.stored["r"].choices[0].reason is FinishReason.LENGTH


@pytest.mark.parametrize(("name", "stop_reason"), [("eos_token_ids", None), ("stop_token_ids", 7)])
def test_a_last_token_that_ends_the_request_ends_it_unless_min_tokens_forbid(
    core: EngineCore, name: str, stop_reason: int | None
) -> None:
    for min_tokens, num_tokens in ((3, 3), (4, 6)):
        source = make_source("r", PROMPT, max_tokens=6, min_tokens=min_tokens, **{name: [7]})
        folded = fold(source, [], [])
        folded.choices[0].token_ids = np.array([400, 401, 7], np.int32)
        (choice,) = Life(core).run(arrive(core, source, folded)).stored["r"].choices
        assert len(choice.token_ids) // 4 == num_tokens
        ends = (FinishReason.STOP, stop_reason) if num_tokens == 3 else (FinishReason.LENGTH, None)
        assert (choice.reason, choice.stop_reason) == ends


def test_a_resumed_request_comes_before_those_that_wait(core: EngineCore) -> None:
    """And its tokens count in what it needs: the scheduler sees prompt and output."""
    source = make_source("resumed", PROMPT, max_tokens=40)
    folded = fold(source, [], [], times=RequestTimes(scheduled=1.0, first_token=2.0))
    folded.choices[0].token_ids = np.arange(400, 430, dtype=np.int32)
    life = Life(core)
    others = [arrive(core, make_source(f"r{number}", PROMPT, handle=number + 2, max_tokens=2)) for number in range(20)]
    for arrival in (*others, arrive(core, source, folded)):
        life.loop.inbox.put(arrival)
    life.loop._take_in()
    first = next(iter(core.scheduler.waiting))
    assert (first.request_id, first.num_tokens) == ("resumed", 70)
    assert len(tokens_of(life.run().stored["resumed"])[0]) == 40


def test_a_replay_under_another_handle_is_whole(core: EngineCore) -> None:
    source = make_source("r", PROMPT, n=2, max_tokens=5, logprobs=1, prompt_logprobs=0)
    calm = Life(core).run(arrive(core, source))
    folded = fold_life(calm, source, len(calm.messages) - 1)
    life = Life(core)
    life.loop.inbox.put(arrive(core, source, folded))
    life.loop._take_in()
    events = []
    life.loop.publisher.put = events.append  # type: ignore[method-assign]
    life.loop.inbox.put(Replay("api:2", [Lack("r", 77, [(0, 0), (1, 0)], prompt_position=1)]))
    life.loop._take_in()
    life.loop.publisher.put = life._put  # type: ignore[method-assign]
    replays = [("api:2", message) for _, message in events[0].replays]
    replayed = fold(make_source("r", PROMPT, 77, n=2, logprobs=1, prompt_logprobs=0), replays, [("api:2", 77)])
    assert all(told.handle == 77 for choice in replayed.choices for told in choice.logprobs)
    for got, had in zip(replayed.choices, folded.choices, strict=True):
        assert got.token_ids.tolist() == had.token_ids.tolist() and len(got.logprobs) == len(had.logprobs) > 0
    assert replayed.prompt_logprobs[-1].end == len(PROMPT)
    life.run()


# ---------------------------------------------------------------- the real model


@pytest.fixture(scope="module")
def model(smollm2_gguf: Path) -> Iterator[LLM]:
    with LLM(str(smollm2_gguf), device="cpu", num_threads=1, max_model_len=256, num_gpu_blocks_override=200) as llm:
        yield llm


def test_the_model_goes_on_token_for_token(model: LLM) -> None:
    """Penalties, rules on tokens, seeds, ends and logprobs, cut at every step."""
    core, tokenizer = model.core, model._tokenizer
    assert isinstance(tokenizer, Tokenizer)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text).ids
        return ids

    def once(**sampling: object) -> list[int]:
        plain = make_source(
            "plain", encode("Once upon a time, in a village by the sea,"), temperature=0.0, max_tokens=12, **sampling
        )
        return tokens_of(Life(core).run(arrive(core, plain)).stored["plain"])[0]

    story = once()
    sampled = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": 1234}
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4}
    cases: list[tuple[str, dict[str, object]]] = [
        ("1 2 3 4 5 6", {"temperature": 0.0, "logprobs": 2, **penalties}),
        ("The three laws of thermodynamics say", {**sampled, **penalties, "n": 2, "logprobs": 0, "prompt_logprobs": 1}),
        ("Once upon a time, in a village by the sea,", {"temperature": 0.0, "stop_token_ids": [story[9]]}),
        ("Once upon a time, in a village by the sea,", {"temperature": 0.0, "eos_token_ids": [story[3]], "min_tokens": 8}),
        ("Dear Sir or Madam,", {**sampled, "logit_bias": {story[1]: 4.0, story[2]: -100.0}}),
        ("Once upon a time, in a village by the sea,", {"temperature": 0.0, "bad_words_token_ids": [story[2:4], story[5:8]]}),
        ("Once upon a time, in a village by the sea,", {**sampled, "allowed_token_ids": sorted(set(story))}),
    ]
    sources = [
        make_source(f"r{number}", encode(prompt), number, **{"max_tokens": 12, **sampling})
        for number, (prompt, sampling) in enumerate(cases)
    ]
    assert core.scheduler.reset_prefix_cache()
    calm = Life(core).run(*(arrive(core, source) for source in sources))
    assert tokens_of(calm.stored["r5"])[0] != story, "the bad words did not matter"
    for cut in range(1, len(calm.messages) + 1):
        assert core.scheduler.reset_prefix_cache()
        folded = [fold_life(calm, source, cut, keep_ends=cut < len(calm.messages)) for source in sources]
        assert any(len(choice.token_ids) for each in folded for choice in each.choices)
        second = Life(core).run(*(arrive(core, *each) for each in zip(sources, folded, strict=True)))
        for name, stored in calm.stored.items():
            assert_same_output(second.stored[name], stored)
