"""vLLM's Scheduler under the load of `scheduler.py`, which starts this file with an interpreter that has vLLM.

Reads a number of requests a line from stdin; answers each with a line of JSON: milliseconds of `schedule()` plus
`update_from_output()` in every step of pure decodes, and in those (`calm`) in which no request gets or completes a block.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from typing import Any

os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE, NUM_BLOCKS = 16, 40_000


def accepted(function: Any, **arguments: Any) -> dict[str, Any]:
    """The arguments that the signature of this version of vLLM has."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in known}


def make_scheduler(model: str, num_requests: int) -> Scheduler:
    config = VllmConfig(
        model_config=ModelConfig(model=model, tokenizer=model, dtype="float32", seed=0, max_model_len=2048),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=num_requests,
            max_num_batched_tokens=8192,
            max_model_len=2048,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
    )
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    layer = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], layer)]
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        log_stats=True,
    )


def make_request(index: int) -> Request:
    return Request(
        request_id=str(index),
        prompt_token_ids=[index + 3] * 100,
        sampling_params=SamplingParams(max_tokens=1500, ignore_eos=True),
        pooling_params=None,
        **accepted(Request.__init__, eos_token_id=2, block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256)),
    )


def measure(model: str, num_requests: int, num_steps: int) -> dict[str, list[float]]:
    scheduler = make_scheduler(model, num_requests)
    for index in range(num_requests):
        scheduler.add_request(make_request(index))
    calm: list[float] = []
    every: list[float] = []
    while len(every) < num_steps:
        begin = time.thread_time()
        plan = scheduler.schedule()
        planned = time.thread_time()
        ids = list(plan.num_scheduled_tokens)
        requests = [scheduler.requests[request_id] for request_id in ids]
        sampled = [[5] if request.num_computed_tokens >= request.num_prompt_tokens else [] for request in requests]
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            **accepted(ModelRunnerOutput, logprobs=None, prompt_logprobs_dict={}, pooler_output=None),
        )
        answered = time.thread_time()
        scheduler.update_from_output(plan, output)
        end = time.thread_time()
        if len(ids) == num_requests == plan.total_num_scheduled_tokens and all(sampled):
            taken = (planned - begin + end - answered) * 1e3
            every.append(taken)
            whole = any(request.num_computed_tokens % BLOCK_SIZE == 0 for request in requests)
            if not whole and not any(plan.scheduled_cached_reqs.new_block_ids):
                calm.append(taken)
    return {"calm": calm, "every": every}


def main() -> None:
    init_none_hash(sha256)
    model, num_steps = sys.argv[1], int(sys.argv[2])
    for line in sys.stdin:
        print(json.dumps(measure(model, int(line), num_steps)), flush=True)


if __name__ == "__main__":
    main()
