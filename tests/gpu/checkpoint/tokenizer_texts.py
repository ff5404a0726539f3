"""Texts that tokenizers have to cut, and tokenizers as headrace and transformers load them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gpu.checkpoint.tokenizer_files import load_tokenizer_files

# text -> its tokens in SmolLM2's file according to llama.cpp (`llama-tokenize --ids`, build 11434)
LLAMA_CPP_IDS: dict[str, list[int]] = {
    "Hello, world!": [19556, 28, 905, 17],
    "a  1": [81, 256, 33],
    "\n\n1. item\n2. item": [1116, 33, 30, 5033, 198, 34, 30, 5033],
    "  12 cats": [256, 33, 34, 7680],
    "🎉👨\u200d👩 🇩🇪": [10813, 232, 227, 10813, 235, 118, 321, 231, 10813, 235, 119, 15107, 225, 119, 10813, 225, 120],
    "日本語のテキスト、中文。": [
        23274,
        115,
        40993,
        179,
        120,
        248,
        26453,
        11100,
        224,
        10391,
        251,
        10391,
        134,
        11100,
        226,
        29917,
        28589,
        29184,
        19076,
    ],
    "한국어 مرحبا हिन्दी ไทย": [
        33085,
        246,
        181,
        130,
        251,
        183,
        240,
        129,
        36395,
        20602,
        44626,
        31462,
        10805,
        12335,
        134,
        27011,
        30658,
        16525,
        44757,
        37189,
        216,
        31933,
        222,
        10283,
        241,
        10283,
        112,
    ],
    "e\u0301 n\u0303 A\u030a ﬁ": [85, 151, 219, 304, 151, 221, 330, 151, 228, 40367],
    "tabs\t\t\tand   spaces    \n   \n\n x": [100, 7366, 1656, 197, 397, 256, 5600, 47213, 1116, 1792],
    "3.14 10,000 ١٢ ½ ² ⅷ": [
        35,
        30,
        33,
        36,
        216,
        33,
        32,
        28,
        32,
        32,
        32,
        216,
        164,
        111,
        164,
        112,
        216,
        16738,
        216,
        19133,
        216,
        173,
        223,
        132,
    ],
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> <|im_start|>": [1, 4093, 198, 6004, 2, 198, 0, 216, 1],
    "don't I'LL we've 'S": [12420, 982, 339, 23, 16421, 392, 3543, 637, 67],
    "\r\n\r\nwin": [7209, 198, 5544],
    "\u00a0nbsp\u2003em\u200bzw": [15442, 94, 32093, 321, 221, 391, 321, 229, 106, 103],
    "def f(x):\n    return x**2  # ok": [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 216, 907, 10907],
    "null\x00byte": [18220, 190, 26846],
    "trailing   ": [4861, 4966, 333],
    "ÄÖÜ ß ẞ": [142, 222, 142, 240, 142, 246, 5549, 249, 15822, 135, 248],
    "<repo_name>x<file_sep>": [3, 104, 5],
    "“quotes” — dashes…": [1585, 385, 2346, 573, 1841, 287, 9604, 2829],
    "$100 €20 5% C++ #1 @me a_b": [20, 33, 32, 32, 24927, 34, 32, 216, 37, 21, 340, 11444, 907, 33, 3394, 1558, 253, 79, 82],
    "a" * 9 + " " * 40 + "b": [46880, 46880, 81, 12427, 415, 278],
    "": [],
}
TEXTS = list(LLAMA_CPP_IDS)


def tokenizer_of(path: Path) -> Tokenizer:
    return Tokenizer.from_str(load_tokenizer_files(path).tokenizer_json)


@cache
def transformers_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    return (
        AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name) if path.is_file() else AutoTokenizer.from_pretrained(path)
    )
