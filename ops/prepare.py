"""Checks the configuration and settles the model before any process is started."""

from __future__ import annotations

import logging
from collections.abc import Callable

from engine.config import ServeConfig
from gpu.checkpoint.model_files import find_model, model_name
from gpu.config import ModelConfig
from gpu.errors import CheckpointError, UnsupportedConfiguration
from ops.errors import CommandError, SettingError
from ops.folders import cache_folder
from ops.settings import SETTINGS, Resolved

log = logging.getLogger(__name__)

NO_EFFECT = {
    "enable_chunked_prefill": "prompts are always computed in chunks",
    "trust_remote_code": "code of a model's repository is never run",
}
DEMO_NAME = "SmolLM2-135M-Instruct"


def check(config: ServeConfig) -> None:
    """Raises SettingError for a setting that is wrong with any model."""
    if not config.model.model:
        raise SettingError("no model is given: name a safetensors directory, a .gguf file, or `demo`")
    if config.model.model != "demo" and config.model.load_format != "null":
        try:
            find_model(config.model.model)
        except CheckpointError as error:
            raise SettingError(str(error)) from None
    _check_script(config.model)
    for name, value in (
        ("api-server-count", config.api.api_server_count),
        ("tensor-parallel-size", config.parallel.tensor_parallel_size),
        ("block-size", config.cache.block_size),
        ("max-num-seqs", config.scheduler.max_num_seqs),
        ("max-num-batched-tokens", config.scheduler.max_num_batched_tokens),
    ):
        if value is not None and value < 1:
            raise SettingError(f"--{name} must be at least 1, got {value}")
    for name, value in (
        ("data-parallel-size", config.parallel.data_parallel_size),
        ("data-parallel-rank", config.parallel.data_parallel_rank),
    ):
        if value < 0:
            raise SettingError(f"--{name} must not be negative, got {value}")
    if 0 < config.parallel.data_parallel_size <= config.parallel.data_parallel_rank:
        raise SettingError("--data-parallel-rank counts from 0 and must be less than --data-parallel-size")
    if any(size < 1 for size in config.model.cuda_graph_sizes):
        raise SettingError("--cuda-graph-sizes must each be at least 1")
    if config.parallel.distributed_executor_backend == "uni" and config.parallel.tensor_parallel_size > 1:
        raise SettingError("--distributed-executor-backend uni runs one rank only; --tensor-parallel-size above 1 needs mp")
    if not 0 < config.cache.gpu_memory_utilization <= 1:
        raise SettingError(f"--gpu-memory-utilization must be above 0 and at most 1, got {config.cache.gpu_memory_utilization}")
    if config.api.asks_for_keys:
        from api.errors import ConfigurationError
        from api.http.key_ring import KeyRing

        for flag, ring in (("--api-key", (config.api.api_key,)), ("--api-key-file", ([], config.api.api_key_file))):
            try:
                KeyRing(*ring)
            except ConfigurationError as error:
                raise SettingError(f"{flag}: {error}") from None


def _check_script(model: ModelConfig) -> None:
    if (model.load_format == "scripted") != bool(model.script):
        raise SettingError("--load-format scripted and --script FILE go together")
    if model.script:
        from gpu.stand_in.script import Script

        try:
            Script.read(model.script)
        except UnsupportedConfiguration as error:
            raise SettingError(str(error)) from None


def tell_of_no_effect(resolved: Resolved) -> None:
    """Settings that vLLM has and that change nothing here are taken, and told of."""
    for name, why in NO_EFFECT.items():
        if resolved.sources[name] != "default":
            log.warning("%s has no effect: %s", SETTINGS[name].flag, why)


def fetch_model(resolved: Resolved, show: Callable[[str, float | None], None] = lambda phase, fraction: None) -> None:
    """Replace `demo` by the path of the demo model, which the first use downloads; `show` hears how far it is."""
    if resolved.config.model.model != "demo":
        return
    from ops.demo import DemoError, fetch_demo

    try:
        path = fetch_demo(lambda fraction: show("fetch", fraction))
    except DemoError as error:
        raise CommandError(str(error)) from None
    resolved.derive("model", str(path), "`demo`")
    if not resolved.config.api.served_model_name:
        resolved.derive("served_model_name", [DEMO_NAME], "`demo`")


def place_weights(resolved: Resolved) -> None:
    """Settle where packed weights are kept, where no folder was named."""
    if resolved.config.model.weights_cache_dir:
        return
    try:
        resolved.derive("weights_cache_dir", str(cache_folder() / "weights"), "the cache folder")
    except SettingError as error:  # it can be done without: each engine has weights of its own then
        resolved.derive("weights_cache_dir", "none", str(error))


def name_model(resolved: Resolved) -> None:
    """Settle under which name clients know the model, where no name was given."""
    if not resolved.config.api.served_model_name:
        resolved.derive("served_model_name", [model_name(resolved.config.model.model)], "from the path")
