"""What a rank's largest step needs of memory, kept beside its packed weights, so that a later start need not compute that step.

It depends on model, numeric class, limits and code alone. Something else at any of them is another file. A file that cannot be read
or written costs the time of the step, not the start.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import torch

from gpu.config import WorkerConfig
from kernels import CACHE_DIRECTORY
from kernels.cpu.ir import features

logger = logging.getLogger(__name__)


class StepMemory:
    """Bytes, in the file `path`; None: they are not kept."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def read(self) -> int | None:
        if self._path is None:
            return None
        try:
            kept = int(self._path.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be read: %s", self._path, error)
            return None
        return kept if kept >= 0 else None

    def write(self, num_bytes: int) -> None:
        if self._path is None:
            return
        draft = self._path.with_suffix(f".{os.getpid()}")
        try:
            draft.write_text(str(num_bytes))
            draft.rename(self._path)
        except OSError as error:
            logger.warning("%s cannot be written: %s", self._path, error)


def step_memory(folder: str, weights_name: str, config: WorkerConfig, kv_dtype: torch.dtype) -> StepMemory:
    """For the rank whose packed weights have this name in `folder`; empty: nothing is kept."""
    if not folder:
        return StepMemory(None)
    # The directory of compiled kernels is named by their sources.
    parts = [config.max_num_batched_tokens, config.max_num_seqs, config.cache.block_size, kv_dtype, torch.__version__]
    parts += [CACHE_DIRECTORY.name, *sorted(features())]
    key = hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]
    return StepMemory(Path(folder).expanduser() / f"{Path(weights_name).stem}-{key}.step")
