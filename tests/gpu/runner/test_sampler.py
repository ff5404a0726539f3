"""Each sampling parameter by what it must and must not do to a draw."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gpu.runner.sampler
from gpu.plan import NewRequest, SamplingParams, SchedulerOutput
from gpu.runner.input_batch import Batch
from gpu.runner.sampler import NO_TOKEN, NOT_FINITE, Sampler, top_logprobs

VOCAB = 50
PROMPT = [1, 2, 3]


def make_batch(*rows, vocab=VOCAB):
    """rows: (SamplingParams, output token ids so far) each; all with the prompt 1 2 3."""
    batch = Batch(max(8, len(rows)), 64, 16, vocab, torch.device("cpu"))
    none = np.zeros(0, np.int32)
    new = [
        NewRequest(row, np.array(PROMPT + output, np.int32), len(PROMPT), 0, none, sampling, sampling.seed)
        for row, (sampling, output) in enumerate(rows)
    ]
    batch.apply(SchedulerOutput(0, [], new, none, none, none, none, 0))
    return batch


def sample(logits, *rows, mode="raw_logprobs"):
    batch = make_batch(*rows, vocab=logits.shape[1])
    return Sampler(mode)(logits.clone(), np.arange(len(rows), dtype=np.int32), batch.sampling, batch.histories)


def random_logits(rows, seed=0, scale=3.0):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def greedy(**more):
    return SamplingParams(temperature=0.0, **more)


def draws(logits, count=400, output=(), **params):
    """The set of tokens that `count` seeds draw from one row of logits."""
    rows = [(SamplingParams(seed=seed, **params), list(output)) for seed in range(count)]
    return set(sample(logits.expand(count, -1), *rows).token_ids.tolist())


def test_greedy_is_argmax_in_any_batch():
    logits = random_logits(6)
    mixed = [(greedy() if row % 2 else SamplingParams(seed=row), []) for row in range(6)]
    best = logits.argmax(1).tolist()
    assert sample(logits, *[(greedy(), [])] * 6).token_ids.tolist() == best
    assert sample(logits, *mixed).token_ids.tolist()[1::2] == best[1::2]


def test_a_tiny_temperature_and_top_k_one_are_greedy():
    logits = random_logits(2)
    params = [(SamplingParams(temperature=0.01, seed=4), []), (SamplingParams(temperature=2.0, top_k=1, seed=4), [])]
    assert sample(logits, *params).token_ids.tolist() == logits.argmax(1).tolist()


def test_top_k_draws_from_the_k_likeliest():
    logits = random_logits(1, scale=0.5)
    assert draws(logits, top_k=4) == set(logits[0].topk(4).indices.tolist())


def test_top_p_draws_from_the_nucleus():
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
    assert draws(logits, top_p=0.65) == {0, 1}


def test_min_p_follows_temperature():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    assert draws(logits, min_p=0.4) == {0, 1}
    assert draws(logits, min_p=0.4, temperature=2.0) == {0, 1, 2}, "temperature comes first: 0.3 ** 0.5 is more than 0.4"


def test_top_p_looks_at_what_top_k_left():
    logits = torch.log(torch.tensor([[0.3, 0.25, 0.25, 0.2]]))
    assert draws(logits, top_k=1, top_p=0.5) == {0}
    assert draws(logits, top_k=3, top_p=0.7) == {0, 1, 2}, "0.3 and 0.25 of 0.8 are less than 0.7"


def test_seeds_and_positions_change_the_draw_and_nothing_else_does():
    logits = random_logits(1, scale=0.3)
    params = SamplingParams(seed=9)
    alone = sample(logits, (params, [])).token_ids[0]
    crowd = sample(
        logits.expand(5, -1), *[(SamplingParams(seed=s), []) for s in (1, 2)], (params, []), (params, [8]), (greedy(), [])
    )
    assert crowd.token_ids[2] == alone
    assert len(draws(logits)) > 30
    by_position = {int(sample(logits, (params, [8] * n)).token_ids[0]) for n in range(30)}
    assert len(by_position) > 10


def test_seeds_of_64_bits_in_either_reading():
    logits = random_logits(1, scale=0.3)
    tokens = [sample(logits, (SamplingParams(seed=seed), [])).token_ids[0] for seed in (-1, 2**64 - 1)]
    assert tokens[0] == tokens[1]


def test_logit_bias():
    logits = torch.zeros(1, VOCAB)
    assert sample(logits, (greedy(logit_bias={33: 0.5, 34: -100.0}), [])).token_ids.tolist() == [33]
    assert 34 not in draws(logits, logit_bias={34: -100.0})


def test_allowed_token_ids():
    assert draws(random_logits(1, scale=0.1), allowed_token_ids=[4, 44]) == {4, 44}


def test_bad_words_ban_the_last_token_where_the_output_ends_in_the_rest():
    logits = torch.zeros(1, VOCAB)
    logits[0, 9] = 5.0
    bad = greedy(bad_words_token_ids=[[7, 8, 9]])
    chosen = [sample(logits, (bad, output)).token_ids[0] for output in ([], [8], [7, 8], [7, 8, 1], [5, 7, 8])]
    assert chosen == [9, 9, 0, 9, 0]
    assert sample(logits, (greedy(bad_words_token_ids=[[9]]), [])).token_ids.tolist() == [0]
    # the prompt ends in 2 3, which does not count as output
    assert sample(logits, (greedy(bad_words_token_ids=[[2, 3, 9]]), [])).token_ids.tolist() == [9]


def test_min_tokens_masks_ends_until_reached():
    logits = torch.zeros(1, VOCAB)
    logits[0, 2], logits[0, 6] = 9.0, 8.0
    params = greedy(min_tokens=2, eos_token_ids=[2], stop_token_ids=[6], ignore_eos=True)
    assert [sample(logits, (params, output)).token_ids[0] for output in ([], [5], [5, 5])] == [0, 0, 2]


def test_bias_does_not_lift_a_mask():
    params = greedy(allowed_token_ids=[4], logit_bias={5: 100.0})
    assert sample(torch.zeros(1, VOCAB), (params, [])).token_ids.tolist() == [4]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.01, "top_p": 0.5}, {"temperature": 2.0, "min_p": 0.1}])
def test_repetition_penalties_at_the_ends_of_their_range_fail_no_row(params):
    logits = torch.full((1, VOCAB), -1.0)
    logits[0, 3], logits[0, 9] = 2.0, 5.0  # 3 stands in the prompt
    company = (SamplingParams(temperature=0.0), [])
    for penalty, drawn in ((5e-324, 3), (1e308, 9)):
        sampled = sample(logits.expand(2, -1), (SamplingParams(repetition_penalty=penalty, seed=7, **params), []), company)
        assert sampled.failed == {}
        assert sampled.token_ids.tolist() == [drawn, 9]


def test_penalties_look_at_output_and_repetition_at_the_prompt_too():
    logits = torch.zeros(1, VOCAB)
    logits[0, 1], logits[0, 8], logits[0, 9] = 2.0, 1.9, 1.8
    cases = [
        (greedy(), [1], 1),
        (greedy(presence_penalty=0.15), [1], 8),
        (greedy(presence_penalty=0.15), [], 1),  # 1 stands in the prompt alone
        (greedy(frequency_penalty=0.08), [1], 1),
        (greedy(frequency_penalty=0.08), [1, 1], 8),
        (greedy(repetition_penalty=1.08), [], 8),
        (greedy(repetition_penalty=1.3), [8], 9),
    ]
    assert [sample(logits, (params, output)).token_ids[0] for params, output, _ in cases] == [chosen for *_, chosen in cases]
    together = sample(logits.expand(len(cases), -1), *[case[:2] for case in cases])
    assert together.token_ids.tolist() == [chosen for *_, chosen in cases]


def test_raw_and_processed_logprobs():
    logits = random_logits(2)
    rows = [(SamplingParams(seed=3, temperature=0.5, top_k=3, logprobs=5, logit_bias={11: 50.0}), []), (greedy(), [])]
    raw, processed = sample(logits, *rows), sample(logits, *rows, mode="processed_logprobs")
    assert raw.token_ids.tolist() == processed.token_ids.tolist()
    (entry,) = raw.logprobs
    logprobs = logits[0].log_softmax(0)
    assert entry.row == 0 and entry.token_ids[0] == 11
    torch.testing.assert_close(torch.from_numpy(entry.logprobs), logprobs[torch.from_numpy(entry.token_ids).long()])
    assert entry.rank == (logprobs > logprobs[11]).sum() + 1 > 1
    assert entry.token_ids[1:].tolist() == logprobs.topk(5).indices.tolist()
    (entry,) = processed.logprobs
    biased = logits[0].clone()
    biased[11] += 50
    kept = (biased / 0.5).topk(3)
    torch.testing.assert_close(torch.from_numpy(entry.logprobs[1:4]), kept.values.log_softmax(0))
    assert entry.rank == 1 and np.isneginf(entry.logprobs[4:]).all()


def test_top_logprobs_with_more_rows_than_one_k():
    logits = random_logits(3)
    rows = [(greedy(logprobs=k), []) for k in (0, 4, -1)]
    assert [len(entry.token_ids) for entry in sample(logits, *rows).logprobs] == [1, 5, VOCAB + 1]


def test_rank_counts_likelier_tokens_only():
    ids, values, ranks = top_logprobs(torch.tensor([[1.0, 2.0, 2.0, 0.0]]), torch.tensor([2]), 1)
    assert ranks.tolist() == [1] and ids[0, 0] == 2 and values.shape == (1, 2)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_not_finite_logits_fail_their_row_only(poison):
    logits = random_logits(3)
    expected = sample(logits, *[(SamplingParams(seed=1, logprobs=1), [])] * 3).token_ids
    logits[1, 17] = poison
    sampled = sample(logits, *[(SamplingParams(seed=1, logprobs=1), [])] * 3)
    assert sampled.failed == {1: NOT_FINITE}
    assert sampled.token_ids[[0, 2]].tolist() == expected[[0, 2]].tolist()
    assert [entry.row for entry in sampled.logprobs] == [0, 2]


def test_no_token_left_fails_the_row():
    params = dict(allowed_token_ids=[2], min_tokens=1, eos_token_ids=[2])
    sampled = sample(torch.zeros(3, VOCAB), (greedy(**params), []), (SamplingParams(**params), []), (greedy(), []))
    assert sampled.failed == {0: NO_TOKEN, 1: NO_TOKEN}


def test_a_row_freed_and_taken_again_forgets_everything():
    batch = make_batch((greedy(logit_bias={5: 100.0}, repetition_penalty=2.0, logprobs=3), []))
    none = np.zeros(0, np.int32)
    request = NewRequest(0, np.array(PROMPT, np.int32), 3, 0, none, greedy(), 0)
    batch.apply(SchedulerOutput(1, [0], [request], none, none, none, none, 0))
    logits = torch.zeros(1, VOCAB)
    logits[0, 1] = 1.0
    sampled = Sampler("raw_logprobs")(logits, np.zeros(1, np.int32), batch.sampling, batch.histories)
    assert sampled.token_ids.tolist() == [1] and sampled.logprobs == [] and len(batch.sampling.rules) == 0


def num_calls(work):
    """Calls of functions, of Python or C, that `work` makes from Python."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


RULES = {
    "nothing": {},
    "allowed ids": {"allowed_token_ids": list(range(40))},
    "bad words": {"bad_words_token_ids": [[7], [5, 6, 7]]},
    "ends": {"min_tokens": 3, "eos_token_ids": [2], "stop_token_ids": [6]},
    "bias": {"logit_bias": {4: 1.0, 5: -1.0}},
    "penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.2},
    "filters": {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
}


@pytest.mark.parametrize("params", RULES.values(), ids=RULES.keys())
def test_a_step_s_python_does_not_grow_with_its_rows(params):
    def calls_for(count):
        rows = [(SamplingParams(seed=row, **params), [5, 6]) for row in range(count)]
        batch, logits = make_batch(*rows), random_logits(count)
        places = np.arange(count, dtype=np.int32)
        Sampler("raw_logprobs")(logits.clone(), places, batch.sampling, batch.histories)  # compiles what it needs
        return num_calls(lambda: Sampler("raw_logprobs")(logits, places, batch.sampling, batch.histories))

    assert calls_for(2) == calls_for(40)


def test_parameters_of_one_row_cost_nothing_for_other_rows(monkeypatch):
    """One row that asks for everything: what is done for it is done to its logits alone."""
    seen = []
    original_penalties, original_logprobs = gpu.runner.sampler.apply_penalties, gpu.runner.sampler.top_logprobs

    def penalties(logits, *columns):
        seen.append(("penalties", len(logits)))
        original_penalties(logits, *columns)

    def logprobs(logits, token_ids, k):
        seen.append(("logprobs", len(logits), k))
        return original_logprobs(logits, token_ids, k)

    monkeypatch.setattr(gpu.runner.sampler, "apply_penalties", penalties)
    monkeypatch.setattr(gpu.runner.sampler, "top_logprobs", logprobs)
    rows = [(greedy(), [])] * 6
    sample(random_logits(6), *rows)
    assert seen == []
    rows[2], rows[4], rows[5] = (greedy(presence_penalty=1.0, logprobs=3), [1]), (greedy(logprobs=0), []), (greedy(logprobs=0), [])
    sampled = sample(random_logits(6), *rows)
    assert seen == [("penalties", 1), ("logprobs", 2, 0), ("logprobs", 1, 3)]
    assert [entry.row for entry in sampled.logprobs] == [4, 5, 2]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 0.7, "min_p": 0.1, "logprobs": 0}])
def test_logits_are_sorted_only_if_a_row_needs_an_order(params, monkeypatch):
    def forbidden(*arguments, **more):
        raise AssertionError("sorted")

    monkeypatch.setattr(gpu.runner.sampler, "apply_top_k_top_p", forbidden)
    for name in ("sort", "argsort", "topk", "kthvalue"):
        monkeypatch.setattr(torch.Tensor, name, forbidden)
        monkeypatch.setattr(torch, name, forbidden)
    sampled = sample(random_logits(3), *[(SamplingParams(seed=row, **params), []) for row in range(3)])
    assert not sampled.failed


def test_rules_of_many_rows_together_are_those_of_each_alone():
    """Rows come, go and come again in other places; some do not sample."""
    generator = np.random.default_rng(5)
    batch = make_batch(*[(greedy(), [])] * 12)
    rows: dict[int, tuple[SamplingParams, list[int]]] = {}
    none = np.zeros(0, np.int32)
    for step in range(60):
        row = int(generator.integers(12))
        names = [name for name in RULES if generator.random() < 0.4]
        sampling = greedy(**{key: value for name in names for key, value in RULES[name].items() if key != "temperature"})
        output = generator.integers(5, 8, generator.integers(5)).tolist()
        new = NewRequest(row, np.array(PROMPT + output, np.int32), len(PROMPT), 0, none, sampling, 0)
        batch.apply(SchedulerOutput(step, [row], [new], none, none, none, none, 0))
        rows[row] = sampling, output
        sampling_rows = generator.permutation(list(rows))[: generator.integers(1, len(rows) + 1)].astype(np.int32)
        logits = random_logits(len(sampling_rows), seed=step)
        together = Sampler("raw_logprobs")(logits.clone(), sampling_rows, batch.sampling, batch.histories)
        alone = [sample(logits[place : place + 1], rows[row]).token_ids[0] for place, row in enumerate(sampling_rows.tolist())]
        assert together.token_ids.tolist() == alone
    batch.apply(SchedulerOutput(60, list(rows), [], none, none, none, none, 0))
    assert len(batch.sampling.rules) == 0


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    top_k=st.sampled_from([0, 1, 5, 100]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(-(2**63), 2**63 - 1),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5), max_size=2),
    allowed_token_ids=st.sampled_from([[], [], list(range(10, 30))]),
    min_tokens=st.integers(0, 3),
    eos_token_ids=st.just([2]),
    logprobs=st.sampled_from([None, 2]),
)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.lists(st.tuples(params_strategy, st.lists(st.integers(0, VOCAB - 1), max_size=5)), min_size=1, max_size=6))
def test_a_row_is_sampled_alike_alone_and_in_any_batch(rows):
    logits = random_logits(len(rows), seed=len(rows))
    together = sample(logits, *rows)
    reported = {entry.row: entry for entry in together.logprobs}
    for place, row in enumerate(rows):
        alone = sample(logits[place : place + 1], row)
        assert alone.token_ids[0] == together.token_ids[place]
        assert bool(alone.logprobs) == (place in reported)
        if alone.logprobs:
            np.testing.assert_allclose(alone.logprobs[0].logprobs, reported[place].logprobs, atol=1e-6)
        sampling, output = row
        if sampling.allowed_token_ids:
            assert together.token_ids[place] in sampling.allowed_token_ids
        if len(output) < sampling.min_tokens:
            assert together.token_ids[place] != 2
