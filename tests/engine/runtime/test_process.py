"""What the engine process makes of configurations and files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from engine.config import EngineConfig
from engine.protocol import decode_bundle, encode
from engine.runtime.serving import tokenizer_bundle
from gpu.config import ModelConfig


def test_the_tokenizer_reaches_redis_whatever_its_configuration_holds(smollm2_hf: Path, tmp_path: Path) -> None:
    """transformers writes "no limit" as 1e30, an integer that MessagePack cannot carry."""
    shutil.copytree(smollm2_hf, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    file = tmp_path / "model" / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "model_max_length": int(1e30), "eos_token": "<|im_end|>"}))
    bundle = tokenizer_bundle(EngineConfig(model=ModelConfig(model=str(tmp_path / "model"))))
    assert decode_bundle(encode(bundle)) == bundle
    assert bundle.tokenizer_config["eos_token"] == "<|im_end|>"
