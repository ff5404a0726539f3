"""SmolLM2-135M-Instruct in float32: transformers' logprobs and greedy tokens, and the same tokens however requests are run."""

import msgspec
import numpy as np
import pytest
import torch

from gpu.plan import SamplingParams
from tests.gpu.engine_stub import GREEDY, Driver, make_config, make_runner

NUM_TOKENS = 8
NUM_ALONE = 6
SEEDED = SamplingParams(temperature=0.7, top_p=0.95, seed=123, max_tokens=1000)
NEAR_TIE = 1e-3  # "the same tokens": equal save where the two best candidates are closer than this
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived a fisherman who",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Water boils at a temperature of",
    "The quick brown fox jumps over the lazy",
    "In 1969, Neil Armstrong became the first person to",
    "2 + 2 = 4, 3 + 3 = 6, 4 + 4 =",
    "Les enfants jouent dans le jardin pendant que leur mère",
    "SELECT name, age FROM users WHERE",
    "Photosynthesis is the process by which green plants",
    "Dear Sir or Madam,\n\nI am writing to complain about",
    "The three primary colours are red, yellow and",
    "import numpy as np\n\ndef mean(values):\n    return",
    "My favourite book is Moby-Dick, because",
    "To be, or not to be, that is the",
    "Ingredients: 200 g flour, 3 eggs, 100 ml milk. First, mix",
    "The mitochondria is the powerhouse of the",
    "Question: What is the tallest mountain on Earth?\nAnswer:",
    "Berlin ist die Hauptstadt von",
    '{"name": "Alice", "age": 30, "city":',
    "She opened the door slowly, and to her surprise she saw",
    "日本の首都は",
    "An atom consists of protons, neutrons and",
    "for i in range(10):\n    print(",
    "The stock market fell sharply on Monday after",
    "A good night's sleep is important because it",
    "Roses are red, violets are blue,",
    "The Roman Empire fell in the year",
    "<|im_start|>user\nName three fruits.<|im_end|>\n<|im_start|>assistant\n",
    "HTTP status code 404 means that",
    "El sol sale por el este y se pone por el",
    "If it rains tomorrow, then we will stay at home; otherwise we",
]


@pytest.fixture(scope="module")
def prompts(smollm2_hf):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_hf)(PROMPTS)["input_ids"]


@pytest.fixture(scope="module")
def runner(smollm2_hf):
    return make_runner(make_config(smollm2_hf))


def test_logprobs_and_greedy_tokens_of_32_prompts_equal_transformers(smollm2_hf, prompts, runner):
    from transformers import AutoModelForCausalLM

    driver = Driver(runner)
    for row, prompt in enumerate(prompts):
        driver.add(row, prompt, SamplingParams(temperature=0.0, logprobs=0, prompt_logprobs=0))
    driver.run({row: len(prompt) for row, prompt in enumerate(prompts)})
    driver.generate(NUM_TOKENS)
    theirs = AutoModelForCausalLM.from_pretrained(smollm2_hf, dtype=torch.float32)
    for row, prompt in enumerate(prompts):
        tokens = torch.tensor(driver.tokens[row])
        with torch.inference_mode():
            logprobs = theirs(tokens[None]).logits[0, :-1].log_softmax(-1)
        (of_prompt,) = [entry for entry in driver.outputs[0].prompt_logprobs if entry.row == row]
        sampled = [entry.logprobs[0] for output in driver.outputs for entry in output.logprobs if entry.row == row]
        ours = torch.from_numpy(np.concatenate([of_prompt.logprobs, sampled]).astype(np.float32))
        torch.testing.assert_close(ours, logprobs.gather(1, tokens[1:, None])[:, 0], atol=1e-3, rtol=0)
        best = logprobs[len(prompt) - 1 :].topk(2)
        wrong = best.indices[:, 0] != tokens[len(prompt) :]
        assert (best.values[wrong, 0] - best.values[wrong, 1] < NEAR_TIE).all(), PROMPTS[row]


@pytest.fixture(scope="module")
def requests(prompts):
    """16 longer prompts, greedy and sampled by turns: (prompt, SamplingParams) each."""
    longer = [prompts[i] + prompts[i + 1] + prompts[i + 2] + prompts[i + 3] for i in range(16)]
    return [(prompt, SEEDED if i % 2 else GREEDY) for i, prompt in enumerate(longer)]


@pytest.fixture(scope="module")
def alone(requests, runner):
    """(tokens, gaps between the two best candidates) of each of the first requests, run one after the other."""
    results = []
    for prompt, sampling in requests[:NUM_ALONE]:
        driver = Driver(runner)
        driver.add(0, prompt, msgspec.structs.replace(sampling, logprobs=2))
        tokens = driver.generate(NUM_TOKENS)[0]
        results.append((tokens, [output.logprobs[0].logprobs[1] - output.logprobs[0].logprobs[2] for output in driver.outputs]))
    return results


def assert_same(outputs, alone):
    for i, (output, (calm, gaps)) in enumerate(zip(outputs, alone, strict=True)):
        for ours, theirs, gap in zip(output, calm, gaps, strict=True):
            if ours != theirs:
                assert i % 2 == 0 and gap < NEAR_TIE, f"{output} instead of {calm}"
                break  # from here on the texts differ with reason


@pytest.mark.parametrize("chunk", [512, 32])
def test_same_tokens_in_a_batch_of_16(requests, alone, runner, chunk):
    driver = Driver(runner)
    for row, (prompt, sampling) in enumerate(requests):
        driver.add(row, prompt, sampling)
    while unfinished := [row for row in driver.tokens if len(driver.output(row)) < NUM_TOKENS]:
        scheduled, budget = {}, 512
        for row in unfinished:
            if count := min(chunk, driver.left(row), budget):
                scheduled[row] = count
                budget -= count
        driver.run(scheduled)
    assert_same([driver.output(row) for row in range(NUM_ALONE)], alone)


def test_same_tokens_after_preemption_and_with_a_cached_prefix(requests, alone, runner):
    driver = Driver(runner)
    for row, (prompt, sampling) in enumerate(requests[:NUM_ALONE]):
        driver.add(row, prompt, sampling)
    driver.generate(3)
    known, blocks = dict(driver.tokens), dict(driver.blocks)
    for row in range(NUM_ALONE):
        driver.remove(row)
    for row, (prompt, sampling) in enumerate(
        requests[:NUM_ALONE]
    ):  # two anew from nothing, the others from their prompts' full blocks
        cached = 0 if row < 2 else len(prompt) // 16
        driver.add(row + 10, known[row], sampling, prompt_len=len(prompt), computed=cached * 16, blocks=blocks[row][:cached])
    driver.generate(NUM_TOKENS)
    assert_same([driver.output(row + 10) for row in range(NUM_ALONE)], alone)
