"""Perplexity on 20,000 tokens of English: 16 bits cost a thousandth at most, 8 and 4 bits a hundredth."""

import pytest

from benchmarks.perplexity import EXACT, numeric_classes, read_text, score
from gpu.machine import available_cores

CLASSES = numeric_classes()
QUANTIZED = [name for name, options in CLASSES.items() if options["quantization"] != "none"]


@pytest.fixture(scope="module")
def perplexity(smollm2_gguf):
    """Name of a class -> its perplexity, computed once."""
    text, known = read_text(str(smollm2_gguf)), {}

    def of(name):
        if name not in known:
            found = score(str(smollm2_gguf), text, CLASSES[name], num_threads=min(2, available_cores()))
            assert found.num_scored > 0.99 * len(text)
            known[name] = found.perplexity
        return known[name]

    return of


@pytest.mark.soak
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_16_bits_against_float32(perplexity, name):
    assert perplexity(name) == pytest.approx(perplexity(EXACT), rel=1e-3)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_16_bit_kv_against_float32_kv(perplexity, name):
    assert perplexity(f"{name}, 16-bit KV") == pytest.approx(perplexity(name), rel=1e-3)


@pytest.mark.soak
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_against_float32(perplexity, name):
    assert perplexity(name) < 1.01 * perplexity(EXACT)


def test_a_text_is_scored_token_by_token_whatever_the_window(smollm2_gguf):
    text = read_text(str(smollm2_gguf), 61)
    whole = score(str(smollm2_gguf), text[:40], CLASSES[EXACT], window=40)
    assert whole.num_scored == 39
    assert 1.5 < whole.perplexity < 1000
    cut = score(str(smollm2_gguf), text, CLASSES[EXACT], window=20)  # 20, 20, 20, and one token that nothing comes before
    assert cut.num_scored == 57
    with pytest.raises(ValueError, match="fewer than"):
        read_text(str(smollm2_gguf), 10**7)
