"""A generation between its streams and its sink: each choice ends once, and so does the whole, also when either side fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from api.errors import ApiError
from api.preparation.task import Task
from api.request.prompts import Prompt
from api.response.generation import Generation
from api.response.output_processor import ChoiceOutput
from api.text.tokenizer import TextTokenizer
from engine.protocol import AnswerOptions, FinishedOutput, FinishReason, OutputPromptLogprobs, RequestTimes, encode_column
from gpu.plan import SamplingParams


class Recorder:
    """Sink, observer and streams of one generation at once: what each of them is told, in order."""

    def __init__(self) -> None:
        self.outputs: list[ChoiceOutput] = []
        self.ends: list[ApiError | None] = []
        self.counted: list[Any] = []
        self.gaps: list[float] = []
        self.num_aborts = 0
        self.put: Callable[[ChoiceOutput], None] = self.outputs.append

    def end(self, error: ApiError | None = None) -> None:
        self.ends.append(error)

    def opened(self, generation: Generation) -> None:
        self.counted.append("opened")

    def first_output(self, generation: Generation, now: float) -> Callable[[float], None]:
        self.counted.append("first")
        return self.gaps.append

    def choice_ended(self, generation: Generation, reason: FinishReason) -> None:
        self.counted.append(reason)

    def closed(self, generation: Generation) -> None:
        self.counted.append("closed")

    def abort(self) -> None:
        self.num_aborts += 1

    def texts(self) -> dict[int, str]:
        texts: dict[int, str] = {}
        for output in self.outputs:
            texts[output.index] = texts.get(output.index, "") + output.text
        return texts


class FakeModel:
    name, first_name, engine = "tiny", "tiny", "0"

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer


@pytest.fixture
def told() -> Recorder:
    return Recorder()


@pytest.fixture
def make(tokenizer: TextTokenizer, told: Recorder) -> Callable[..., Generation]:
    def make(n: int = 1, prompts: int = 1, max_tokens: int = 9, prompt_logprobs: int | None = None, **task: Any) -> Generation:
        sampling = SamplingParams(n=n, max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
        made = Task("/", FakeModel(tokenizer), [Prompt([5, 6, 7])] * prompts, [sampling] * prompts, **task)  # type: ignore[arg-type]
        generation = Generation(made, "mine", ["mine-1"], 1.0, "tenant", told)
        generation.sink = told
        generation.begin([told])  # type: ignore[list-item]
        return generation

    return make


def end(choice: int = 0, reason: FinishReason = FinishReason.LENGTH, error: str | None = None) -> FinishedOutput:
    return FinishedOutput(1, choice, 1, reason, None, 2, RequestTimes(), error)


def test_each_choice_ends_once_and_so_does_the_whole(
    make: Callable[..., Generation], tokenizer: TextTokenizer, told: Recorder
) -> None:
    generation = make(n=2, prompts=2)
    for place, run in enumerate(generation.runs):
        for choice in range(2):
            assert not told.ends
            run.take_token(choice, tokenizer.encode("abcd")[0], None)
            run.take_end(choice, end(choice))
            assert told.outputs[-1].index == 2 * place + choice
    assert told.ends == [None]
    assert [output.finish_reason for output in told.outputs] == [None, FinishReason.LENGTH] * 4
    assert generation.usage.as_json(True) == {
        "prompt_tokens": 6,
        "total_tokens": 10,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    generation.close()
    generation.close()
    assert told.counted == ["opened", *["first", FinishReason.LENGTH] * 4, "closed"]
    assert not told.num_aborts


def test_a_stop_string_is_told_to_the_stream_and_the_engines_word_is_waited_for(
    make: Callable[..., Generation], tokenizer: TextTokenizer, told: Recorder
) -> None:
    run = make(answer=AnswerOptions(stop=["!"])).runs[0]
    assert run.take_token(0, tokenizer.encode("x")[0], None) is None
    assert run.take_token(0, tokenizer.encode("!")[0], None) == "!"
    assert (told.texts(), told.outputs[-1].stop_reason, told.ends) == ({0: "x"}, "!", [])
    run.take_end(0, end(reason=FinishReason.ERROR, error="it died behind the stop"))
    assert told.ends == [None] and len(told.outputs) == 2


def test_an_abort_ends_open_choices_with_their_held_text(
    make: Callable[..., Generation], tokenizer: TextTokenizer, told: Recorder
) -> None:
    generation = make(n=2, answer=AnswerOptions(stop=["abc"]))
    generation.runs[0].take_token(0, tokenizer.encode("a")[0], None)
    generation.runs[0].take_end(1, end(1))
    generation.abort()
    generation.abort()
    assert told.texts() == {0: "a", 1: ""} and told.ends == [None] and told.num_aborts == 1
    assert [choice.finish_reason for choice in generation.choices] == [FinishReason.ABORT, FinishReason.LENGTH]


def test_an_engines_error_fails_the_whole(make: Callable[..., Generation], told: Recorder) -> None:
    generation = make(n=3)
    generation.runs[0].take_end(1, end(1, FinishReason.ERROR, "cannot open /srv/secret/x"))
    (error,) = told.ends
    assert error is not None and (error.status, error.message) == (500, "cannot open <path>")
    assert not told.outputs and told.num_aborts == 1
    generation.runs[0].take_token(0, 5, None)
    assert not told.outputs, "what comes late is dropped"
    generation.close()
    assert told.counted == ["opened", FinishReason.ERROR, FinishReason.ABORT, FinishReason.ABORT, "closed"]


def test_a_failing_sink_fails_its_generation_and_nobody_else(make: Callable[..., Generation], told: Recorder, caplog: Any) -> None:
    generation = make()

    def fail(output: ChoiceOutput) -> None:
        raise RuntimeError("no text")

    told.put = fail
    assert generation.runs[0].take_token(0, 5, None) is None, "the subscriber goes on"
    assert [error.message for error in told.ends if error] == ["Internal server error."] and told.num_aborts == 1
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.request_id == "mine" and "no text" in record.exc_text


def test_a_sink_that_fails_at_an_abort_still_gets_the_end(make: Callable[..., Generation], told: Recorder) -> None:
    generation = make(n=2)

    def fail(output: ChoiceOutput) -> None:
        raise RuntimeError("no text")

    told.put = fail
    generation.close()
    assert [error.message for error in told.ends if error] == ["Internal server error."]
    assert told.counted[-1] == "closed"


def test_an_end_before_enqueue_has_answered(make: Callable[..., Generation], told: Recorder) -> None:
    """Redis may deliver outputs before it has answered `enqueue`: the streams are not known yet."""
    generation = make()
    generation._streams = ()
    generation.runs[0].take_end(0, end(reason=FinishReason.ERROR, error="broken"))
    assert not told.num_aborts
    generation.begin([told])  # type: ignore[list-item]
    assert told.num_aborts == 1


def test_an_echo_waits_for_its_prompts_logprobs(make: Callable[..., Generation], tokenizer: TextTokenizer, told: Recorder) -> None:
    run = make(answer=AnswerOptions(echo=True), stream=True, prompt_logprobs=0).runs[0]
    token_ids = tokenizer.encode("one two")
    run.take_token(0, token_ids[0], None)
    run.take_prompt_logprobs(OutputPromptLogprobs(1, 1, encode_column([6]), encode_column([0], "float32"), encode_column([1])))
    assert not told.outputs
    run.take_prompt_logprobs(OutputPromptLogprobs(1, 2, encode_column([7]), encode_column([0], "float32"), encode_column([1])))
    assert told.texts() == {0: "one"}
    run.take_token(0, token_ids[1], None)
    assert told.texts() == {0: "one two"}


def test_an_echo_that_is_aborted_shows_what_it_held(
    make: Callable[..., Generation], tokenizer: TextTokenizer, told: Recorder
) -> None:
    generation = make(answer=AnswerOptions(echo=True), stream=True, prompt_logprobs=0)
    generation.runs[0].take_token(0, tokenizer.encode("one")[0], None)
    generation.abort()
    assert told.texts() == {0: "one"} and told.outputs[-1].finish_reason == FinishReason.ABORT


def test_scoring_a_prompt_shows_and_counts_no_token(make: Callable[..., Generation], told: Recorder) -> None:
    generation = make(max_tokens=0)
    assert generation.runs[0].take_token(0, 5, None) is None
    generation.runs[0].take_end(0, end())
    assert told.texts() == {0: ""} and generation.usage.completion_tokens == 0
    assert told.counted == ["opened", FinishReason.LENGTH]


def test_gaps_are_between_the_tokens_of_one_choice(make: Callable[..., Generation], told: Recorder) -> None:
    run = make(n=3).runs[0]
    for _ in range(2):
        for choice in range(3):
            run.take_token(choice, 5, None)
    assert told.counted == ["opened", "first", "first", "first"] and len(told.gaps) == 3


def test_a_sink_that_fails_at_the_end_leaves_no_generation_open(make: Callable[..., Generation], told: Recorder) -> None:
    generation = make()

    class Broken(Recorder):
        def end(self, error: ApiError | None = None) -> None:
            raise RuntimeError("the format is at fault")

    generation.sink = Broken()
    with pytest.raises(RuntimeError):
        generation.close()
    assert told.counted[-1] == "closed"
