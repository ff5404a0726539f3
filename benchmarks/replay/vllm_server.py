"""vLLM's API server over an engine with a recording for a model: `frontend` starts it with an interpreter that has vLLM.

    python vllm_server.py OPTIONS OF `vllm serve`

Its API server, its engine core process, scheduler and ZMQ are the real ones; only the executor, which would have run a model, is
replaced by one that gives recorded tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}

import torch
from recording import Gate, Recording
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import ModelRunnerOutput

LAYER = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32)


class ReplayExecutor(Executor):
    """Answers what an engine core asks its workers, without workers."""

    def _init_executor(self) -> None:
        self._recording = Recording()
        self._gate = Gate()
        self._prompts: dict[str, list[int]] = {}
        self._num_computed: dict[str, int] = {}
        self._answers: dict[str, Any] = {
            "get_kv_cache_spec": {"layer": LAYER},
            "get_supported_kv_cache_layouts": [layout.name for layout in KVCacheLayout],
            "determine_available_memory": 1 << 26,
            "get_supported_tasks": ("generate",),
        }

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        if method == "compile_or_warm_up_model":
            return []
        answer = [self._answers.get(str(method))]
        return _done(answer) if non_block else answer

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        output = self._execute(scheduler_output)
        return _done(output) if non_block else output

    def _execute(self, plan: Any) -> ModelRunnerOutput:
        for request_id in plan.finished_req_ids:
            self._prompts.pop(request_id, None)
            self._num_computed.pop(request_id, None)
        for new in plan.scheduled_new_reqs:
            self._prompts[new.req_id] = new.prompt_token_ids
            self._num_computed[new.req_id] = new.num_computed_tokens
        ids = list(plan.num_scheduled_tokens)
        sampled = [self._sample(request_id, plan.num_scheduled_tokens[request_id]) for request_id in ids]
        self._gate.announce(sum(map(len, sampled)))
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
        )

    def _sample(self, request_id: str, num_scheduled: int) -> list[int]:
        self._num_computed[request_id] += num_scheduled
        prompt = self._prompts[request_id]
        offset = self._num_computed[request_id] - len(prompt)
        return [self._recording.token(prompt[0], offset)] if offset >= 0 else []

    def check_health(self) -> None:
        """No engine process exists that could fail."""


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def main() -> None:
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args()
    validate_parsed_serve_args(arguments)
    arguments.distributed_executor_backend = "vllm_server.ReplayExecutor"  # a name: another process imports it
    uvloop.run(run_server(arguments))


if __name__ == "__main__":
    main()
