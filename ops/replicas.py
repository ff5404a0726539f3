"""How many engines `serve` starts and how many threads each has, with the reason."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gpu.machine import available_cores, compute_threads
from ops.errors import CommandError
from ops.settings import SETTINGS, Resolved

MOST_REPLICAS = 4
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
GPU_DEVICES = ("nvidia0", "nvidiactl", "dxg", "kfd")  # without one of them in /dev there is no GPU to ask torch about


class Replicas:
    """Settles what was left open of `data_parallel_size` and, on the CPU, of `num_threads`."""

    def __init__(self, resolved: Resolved) -> None:
        self.reasons: dict[str, str] = {}  # of what was settled here
        self._resolved = resolved
        self._model, self._parallel = resolved.config.model, resolved.config.parallel
        self.compute_on_gpu = not self._model.computes_nothing and _on_gpu(self._model.device)
        self._computes_on_cpu = not self._model.computes_nothing and not self.compute_on_gpu
        self._threads_are_open = self._computes_on_cpu and self._parallel.num_threads == 0
        self.are_chosen = self._parallel.data_parallel_size == 0  # here, and so may be fewer
        if self.are_chosen:
            self._settle("data_parallel_size", *self._choose())
        self._settle_threads()

    def fall_back(self, why: str) -> None:
        """One engine after all, which has all of the memory."""
        self._settle("data_parallel_size", 1, why)
        self._settle_threads()

    def environment(self, number: int) -> dict[str, str]:
        """The variables of engine `number` of several that the others do not have: its number, and its own GPUs."""
        if self._parallel.data_parallel_size == 1:
            return {}
        rank = {SETTINGS["data_parallel_rank"].variable: str(number)}
        return rank | self._gpus_of(number) if self.compute_on_gpu else rank

    def _gpus_of(self, number: int) -> dict[str, str]:
        ranks = self._parallel.tensor_parallel_size
        needed = self._parallel.data_parallel_size * ranks
        visible = os.environ.get(VISIBLE_GPUS, ",".join(map(str, range(needed)))).split(",")
        if len(visible) < needed:
            raise CommandError(f"{needed} GPUs are needed, {ranks} for each engine, and {VISIBLE_GPUS} names {len(visible)}")
        mine = visible[number * ranks : (number + 1) * ranks]
        return {VISIBLE_GPUS: ",".join(mine), SETTINGS["device"].variable: "cuda"}  # or it would compute on the CPU without them

    def _settle_threads(self) -> None:
        if self._threads_are_open:
            replicas, cores = self._parallel.data_parallel_size, available_cores()
            threads = compute_threads(cores, replicas, self._parallel.tensor_parallel_size)
            reason = f"{_plural(replicas, 'engine')} on {_plural(cores, 'core')}" + (
                "; threads of an engine share a prompt's tokens where a core stands idle" if threads > 1 else ""
            )
            self._settle("num_threads", threads, reason)

    def _settle(self, name: str, value: int, reason: str) -> None:
        self._resolved.derive(name, value, reason)
        self.reasons[name] = reason

    def _choose(self) -> tuple[int, str]:
        """(engines, reason)."""
        if self._model.computes_nothing:
            return 1, "nothing is computed"
        if self.compute_on_gpu:
            return 1, "one on a GPU"
        if self._parallel.tensor_parallel_size > 1:
            return 1, "its ranks share the cores"
        cores = available_cores()
        replicas = replicas_by_cores(cores)
        if replicas == 1:
            return 1, _plural(cores, "core")
        return replicas, f"{_plural(cores, 'core')}; decodes are one thread's work in each engine"


def replicas_by_cores(cores: int) -> int:
    """Engines on a CPU. Measured for two cores, which two engines' decodes fill; half the cores beyond that, unmeasured."""
    return cores if cores <= 2 else min(MOST_REPLICAS, cores // 2)


def _on_gpu(device: str) -> bool:
    """Whether a worker will compute on a GPU. A process of its own asks torch, and only if there may be a GPU."""
    if device != "auto":
        return device == "cuda"
    if not any(Path("/dev", name).exists() for name in GPU_DEVICES):
        return False
    question = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-P", "-c", question], stderr=subprocess.DEVNULL, check=False).returncode == 0


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
