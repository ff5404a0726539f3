"""What a rank's first start measured of its steps, kept beside its packed weights, so that a later start need not compute them.

It depends on model, numeric class, limits, code, processor and threads. Something else at any of them is another file. A file that
cannot be read or written costs the time of the steps, not the start.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import msgspec
import torch

from gpu import machine
from gpu.config import WorkerConfig
from kernels import CACHE_DIRECTORY
from kernels.cpu.ir import features

logger = logging.getLogger(__name__)


class StepProfile(msgspec.Struct, frozen=True):
    memory: int  # bytes that the largest step has at its peak and gives back
    seconds_per_token: float  # of a prompt
    seconds_per_context: float  # more of a token, for each that it attends to


class KeptProfile:
    """A `StepProfile` in the file `path`; None: it is not kept."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def read(self) -> StepProfile | None:
        if self._path is None:
            return None
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=StepProfile)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            logger.warning("%s cannot be read: %s", self._path, error)
            return None
        return kept if kept.memory >= 0 and kept.seconds_per_token > 0 and kept.seconds_per_context >= 0 else None

    def write(self, profile: StepProfile) -> None:
        if self._path is None:
            return
        draft = self._path.with_suffix(f".{os.getpid()}")
        try:
            draft.write_bytes(msgspec.json.encode(profile))
            draft.rename(self._path)
        except OSError as error:
            logger.warning("%s cannot be written: %s", self._path, error)


def kept_profile(folder: str, weights_name: str, config: WorkerConfig, kv_dtype: torch.dtype, threads: int) -> KeptProfile:
    """For the rank whose packed weights have this name in `folder`; empty: nothing is kept."""
    if not folder:
        return KeptProfile(None)
    # The directory of compiled kernels is named by their sources.
    parts = [config.max_num_batched_tokens, config.max_num_seqs, config.cache.block_size, kv_dtype, torch.__version__]
    parts += [machine.processor(), machine.available_cores(), threads, config.parallel.data_parallel_size]
    parts += [CACHE_DIRECTORY.name, *sorted(features())]
    key = hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]
    return KeptProfile(Path(folder).expanduser() / f"{Path(weights_name).stem}-{key}.step")
