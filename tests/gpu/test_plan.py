"""The crossing between engine and workers: what is encoded comes out the same, and small."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu.plan import (
    GREEDY_EPSILON,
    ModelRunnerOutput,
    NewRequest,
    PromptLogprobs,
    SampledLogprobs,
    SamplingParams,
    SchedulerOutput,
    child_seed,
    decode_output,
    decode_plan,
    encode,
)

EMPTY = np.zeros(0, np.int32)

ints = st.integers(-(2**31), 2**31 - 1)
tokens = st.integers(0, 2**31 - 1)
seeds = st.integers(-(2**63), 2**63 - 1)
floats = st.floats(width=32)  # nan and both infinities included: a logprob may be -inf
int32_columns = st.lists(ints, max_size=40).map(lambda values: np.array(values, np.int32))
float32_columns = st.lists(floats, max_size=40).map(lambda values: np.array(values, np.float32))

sampling_params = st.builds(
    SamplingParams,
    n=st.integers(1, 8),
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1),
    top_k=st.integers(0, 1000),
    seed=seeds,
    repetition_penalty=st.floats(0.5, 2),
    logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=3),
    allowed_token_ids=st.lists(tokens, max_size=3),
    bad_words_token_ids=st.lists(st.lists(tokens, min_size=1, max_size=3), max_size=3),
    max_tokens=st.integers(1, 2**31 - 1),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(tokens, max_size=3),
    logprobs=st.none() | st.integers(-1, 20),
    prompt_logprobs=st.none() | st.integers(-1, 20),
)
new_requests = st.builds(NewRequest, st.integers(0, 1023), int32_columns, ints, ints, int32_columns, sampling_params, seeds)
plans = st.builds(
    SchedulerOutput,
    st.integers(0, 2**63 - 1),
    st.lists(st.integers(0, 1023), max_size=5),
    st.lists(new_requests, max_size=3),
    int32_columns,
    int32_columns,
    int32_columns,
    int32_columns,
    ints,
)
outputs = st.builds(
    ModelRunnerOutput,
    st.integers(0, 2**63 - 1),
    int32_columns,
    int32_columns,
    st.lists(st.builds(SampledLogprobs, ints, int32_columns, float32_columns, ints), max_size=3),
    st.lists(st.builds(PromptLogprobs, ints, ints, int32_columns, float32_columns, int32_columns), max_size=3),
    st.dictionaries(st.integers(0, 1023), st.text(), max_size=3),
    st.floats(0, 1e6),
)


def _same(one: object, other: object) -> bool:
    """Equal in type and value; columns in dtype and bits too."""
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, msgspec.Struct):
        return type(one) is type(other) and all(_same(getattr(one, name), getattr(other, name)) for name in one.__struct_fields__)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and one == other


@given(plans)
def test_a_plan_arrives_as_it_was_sent(plan: SchedulerOutput) -> None:
    assert _same(decode_plan(encode(plan)), plan)


@given(outputs)
def test_an_output_arrives_as_it_was_sent(output: ModelRunnerOutput) -> None:
    assert _same(decode_output(encode(output)), output)


def test_empty_columns_keep_their_dtype() -> None:
    plan = decode_plan(encode(SchedulerOutput(0, [], [], EMPTY, EMPTY, EMPTY, EMPTY, 0)))
    assert [plan.rows.dtype, plan.rows.shape] == [np.int32, (0,)]
    logprobs = SampledLogprobs(0, EMPTY, np.zeros(0, np.float32), 1)
    output = decode_output(encode(ModelRunnerOutput(0, EMPTY, EMPTY, [logprobs], [], {}, 0.0)))
    assert output.logprobs[0].logprobs.dtype == np.float32


def test_a_column_of_a_part_of_an_array_travels_whole() -> None:
    """The scheduler sends slices of its tables, which do not lie side by side in memory."""
    table = np.arange(20, dtype=np.int32).reshape(4, 5)
    plan = decode_plan(encode(SchedulerOutput(0, [], [], EMPTY, EMPTY, table[:, 2], table[0, ::2], 0)))
    assert plan.rows.tolist() == [2, 7, 12, 17]
    assert plan.num_scheduled_tokens.tolist() == [0, 2, 4]


def test_decoded_columns_are_read_only() -> None:
    """They are views of the message: a worker that changed one would change what it was told."""
    plan = decode_plan(encode(SchedulerOutput(0, [], [], EMPTY, EMPTY, np.ones(3, np.int32), EMPTY, 0)))
    with pytest.raises(ValueError, match="read-only"):
        plan.rows[0] = 2


def test_a_decode_step_is_two_columns() -> None:
    rows = np.arange(1024, dtype=np.int32)
    payload = encode(SchedulerOutput(1, [], [], EMPTY, EMPTY, rows, np.ones(1024, np.int32), 1024))
    assert len(payload) <= 2 * rows.nbytes + 64


def test_an_object_without_encoding_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="object"):
        encode(ModelRunnerOutput(0, EMPTY, EMPTY, [], [], {0: object()}, 0.0))  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"\x90", b"\x91\xa1x", encode(ModelRunnerOutput(0, EMPTY, EMPTY, [], [], {}, 0.0))]
)
def test_other_bytes_are_no_plan(payload: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_plan(payload)


@given(seeds, st.integers(0, 127))
def test_seeds_of_choices_are_int64_and_the_first_is_the_requests(seed: int, choice: int) -> None:
    assert child_seed(seed, 0) == seed
    assert -(2**63) <= child_seed(seed, choice) < 2**63


@given(seeds)
def test_seeds_of_choices_differ(seed: int) -> None:
    children = [child_seed(seed, choice) for choice in range(1, 128)]
    assert len(set(children)) == len(children)


def test_a_temperature_below_the_epsilon_is_greedy() -> None:
    assert SamplingParams(temperature=0.0).greedy
    assert SamplingParams(temperature=GREEDY_EPSILON / 2).greedy
    assert not SamplingParams(temperature=GREEDY_EPSILON).greedy
