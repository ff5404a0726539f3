"""A choice's text, stop and logprobs; and that they are the same however their pieces are put together."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from api.response.output_processor import Choice, ChoiceOutput, CollectedOutput, TokenLogprobs
from api.text.tokenizer import TextTokenizer
from engine.protocol import FinishedOutput, FinishReason, OutputLogprobs, RequestTimes, encode_column

EOS = 2


@dataclass
class Told:
    """All outputs of a choice, put together."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    ends: list[tuple[FinishReason, int | str | None]] = field(default_factory=list)

    def add(self, output: ChoiceOutput) -> None:
        assert not self.ends, "nothing comes after the end"
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        if output.finish_reason is not None:
            self.ends.append((output.finish_reason, output.stop_reason))


def logprobs_of(offset: int, token_id: int) -> OutputLogprobs:
    return OutputLogprobs(1, 0, offset, encode_column([token_id, 5]), encode_column([-1.0 - offset, -9.0], np.float32), 1)


def finished(num_tokens: int, reason: FinishReason = FinishReason.LENGTH, stop_reason: int | None = None) -> FinishedOutput:
    return FinishedOutput(1, 0, num_tokens, reason, stop_reason, 0, RequestTimes())


def assemble(
    tokenizer: TextTokenizer,
    token_ids: list[int],
    stop: tuple[str, ...] = (),
    include_stop: bool = False,
    min_tokens: int = 0,
    end: FinishedOutput | None = None,
    cuts: frozenset[int] = frozenset(),
) -> Told:
    """`cuts`: pieces in front of which a new merged output begins."""
    choice = Choice(0, tokenizer.detokenizer([40]), stop, include_stop, min_tokens, frozenset([EOS]))
    told, merged = Told(), CollectedOutput(0)
    for offset, token_id in enumerate(token_ids):
        if offset in cuts:
            told.add(merged.output())
            merged = CollectedOutput(0)
        merged.add(choice.take(token_id, logprobs_of(offset, token_id)))
        if choice.finish_reason is not None:
            break
    last = choice.finish(end or finished(len(token_ids)))
    merged.add(last)
    told.add(merged.output())
    stopped = choice.finish_reason == FinishReason.STOP
    assert len(told.token_ids) <= choice.num_tokens if stopped else len(told.token_ids) == choice.num_tokens
    return told


@given(st.data())
def test_any_merging_gives_the_same(tokenizer: TextTokenizer, data: st.DataObject) -> None:
    words = tokenizer.encode("the stop is near, 🚀 the naïve stop. 汉字")
    token_ids = data.draw(st.lists(st.sampled_from(words), max_size=24))
    cuts = data.draw(st.frozensets(st.integers(1, 24), max_size=8))
    stop = tuple(data.draw(st.lists(st.sampled_from(["stop", "the stop", "🚀 t", "near", "is", "汉"]), max_size=3)))
    options = (stop, data.draw(st.booleans()), data.draw(st.integers(0, 5)))
    whole = assemble(tokenizer, token_ids, *options)
    assert assemble(tokenizer, token_ids, *options, cuts=cuts) == whole
    assert len(whole.ends) == 1
    assert [entry.token_ids[0] for entry in whole.logprobs] == whole.token_ids


def test_a_stop_string_across_three_tokens_ends_exactly_there(tokenizer: TextTokenizer) -> None:
    pieces = [tokenizer.encode(piece)[0] for piece in ("x", "ab", "cd", "ef", "tail")]
    told = assemble(tokenizer, pieces, stop=("bcde",))
    assert told.text == "xa"
    assert told.ends == [(FinishReason.STOP, "bcde")]
    assert told.token_ids == pieces[:2]  # those of which some text is shown
    assert [entry.token_ids[0] for entry in told.logprobs] == pieces[:2]
    assert assemble(tokenizer, pieces, stop=("bcde",), include_stop=True).token_ids == pieces[:4]


def test_tokens_wait_with_their_text(tokenizer: TextTokenizer) -> None:
    """A stream has not told them when the stop string is complete, and tells them when it comes to nothing."""
    one, two, three = (tokenizer.encode(digit)[0] for digit in "123")

    def told(choice: Choice, *token_ids: int) -> list[tuple[str, list[int], int]]:
        outputs = [choice.take(token_id, logprobs_of(choice.num_tokens, token_id)) for token_id in token_ids]
        return [(output.text, list(output.token_ids), len(output.logprobs)) for output in outputs]

    stopped = Choice(0, tokenizer.detokenizer([40]), ("12",))
    assert told(stopped, three, one, two) == [("3", [three], 1), ("", [], 0), ("", [], 0)]
    goes_on = Choice(0, tokenizer.detokenizer([40]), ("12",))
    assert told(goes_on, one, three, one) == [("", [], 0), ("13", [one, three], 2), ("", [], 0)]
    last = goes_on.abort()
    assert (last.text, list(last.token_ids), goes_on.num_tokens) == ("1", [one], 3)


def test_a_character_in_halves_waits_as_one(tokenizer: TextTokenizer) -> None:
    halves = tokenizer.encode("汉")
    assert len(halves) > 1
    assert assemble(tokenizer, [*tokenizer.encode("x"), *halves], stop=("汉",)).token_ids == tokenizer.encode("x")
    assert assemble(tokenizer, halves, stop=("never",)).token_ids == halves


def test_text_behind_the_stop_string_in_the_same_token_is_not_shown(tokenizer: TextTokenizer) -> None:
    token_ids = tokenizer.encode("abcdef")
    assert assemble(tokenizer, token_ids, stop=("cd",)).text == "ab"
    assert assemble(tokenizer, token_ids, stop=("cd",), include_stop=True).text == "abcd"


def test_held_text_is_shown_at_the_end(tokenizer: TextTokenizer) -> None:
    token_ids = tokenizer.encode("do not ST")
    assert assemble(tokenizer, token_ids, stop=("STOP",)).text == "do not ST"


def test_held_text_is_shown_at_an_abort(tokenizer: TextTokenizer) -> None:
    choice = Choice(0, tokenizer.detokenizer([40]), ("STOP",))
    text = "".join(choice.take(token_id).text for token_id in tokenizer.encode("do not ST"))
    last = choice.abort()
    assert (text, last.text, last.finish_reason) == ("do not ", "ST", FinishReason.ABORT)


def test_the_text_of_a_stop_token_is_hidden_but_counted(tokenizer: TextTokenizer) -> None:
    token_ids = [*tokenizer.encode("bye"), EOS]
    end = finished(len(token_ids), FinishReason.STOP)
    told = assemble(tokenizer, token_ids, end=end)
    assert (told.text, told.token_ids, told.ends) == ("bye", token_ids, [(FinishReason.STOP, None)])
    assert len(told.logprobs) == len(token_ids)


def test_a_stop_string_inside_min_tokens_does_not_count(tokenizer: TextTokenizer) -> None:
    token_ids = [tokenizer.encode(word)[0] for word in ("one", " two", " one", " two")]
    assert assemble(tokenizer, token_ids, stop=(" two",), min_tokens=2).text == "one two one"
    assert assemble(tokenizer, token_ids, stop=(" two",), min_tokens=1).text == "one"


def test_offsets_count_characters_of_the_text(tokenizer: TextTokenizer) -> None:
    text = "naïve 🚀 go"
    token_ids = tokenizer.encode(text)
    told = assemble(tokenizer, token_ids)
    whole = [len(tokenizer.decode(token_ids[:i]).rstrip("\ufffd")) for i in range(len(token_ids))]
    assert [entry.text_offset for entry in told.logprobs] == whole


def test_the_engines_word_after_a_stop_string_says_nothing(tokenizer: TextTokenizer) -> None:
    choice = Choice(0, tokenizer.detokenizer([40]), ("a",), stop_token_ids=frozenset([EOS]))
    first, last = (choice.take(token_id) for token_id in tokenizer.encode("x a"))
    assert (first.text + last.text, last.stop_reason, choice.finish_reason) == ("x ", "a", FinishReason.STOP)
    assert choice.finish(finished(9, FinishReason.ERROR)) == ChoiceOutput(0)
    assert choice.finish_reason == FinishReason.STOP
