"""The cache's memory is what is announced, aligned, and zero at the start."""

import ctypes
import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpu.models.kv_cache import KVCache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_layout_and_alignment(dtype):
    cache = KVCache(3, 7, 16, 2, 24, dtype, torch.device("cpu"))
    tensors = [tensor for layer in cache.layers for tensor in layer]
    assert sum(tensor.nbytes for tensor in tensors) == 7 * KVCache.block_bytes(3, 16, 2, 24, dtype)
    assert len({tensor.data_ptr() for tensor in tensors}) == 6
    for key, value in cache.layers:
        assert key.shape == (7, 2, 24, 16) and value.shape == (7, 2, 16, 24)
        for tensor in (key, value):
            assert tensor.dtype == dtype and tensor.data_ptr() % 64 == 0 and tensor.is_contiguous() and not tensor.any()
            tensor[-1] = 1.0  # writable to its end


def test_keys_of_a_gpu_have_the_same_shape_and_contiguous_dimensions():
    cache = KVCache(2, 7, 16, 2, 24, torch.bfloat16, torch.device("meta"))
    for key, value in cache.layers:
        assert key.shape == (7, 2, 24, 16) and key.stride(2) == 1 and key.transpose(2, 3).is_contiguous()
        assert value.shape == (7, 2, 16, 24) and value.is_contiguous()


def num_resident_pages(tensor):
    """Pages of a tensor that the machine has given memory to. The size of the process tells of its other threads, too."""
    length = tensor.numel() * tensor.element_size()
    begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    pages = (ctypes.c_ubyte * (-(-(tensor.data_ptr() + length - begin) // mmap.PAGESIZE)))()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(tensor.data_ptr() + length - begin), pages):
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(page & 1 for page in pages)


def touch_a_part():
    """Prints how many pages are resident in all tensors at first, and in one of which 2 MiB of 32 have been written."""
    cache = KVCache(4, 1024, 16, 8, 64, torch.float32, torch.device("cpu"))
    tensors = [tensor for layer in cache.layers for tensor in layer]
    print(sum(map(num_resident_pages, tensors)))
    tensors[0][:64] = 1.0
    print(num_resident_pages(tensors[0]))


def test_memory_is_not_touched_before_it_is_written():
    """In a process of its own: memory that other tests have given back is used again, and cleared for that."""
    command = [sys.executable, "-c", "from tests.gpu.models.test_kv_cache import touch_a_part; touch_a_part()"]
    ran = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True)
    at_first, written = map(int, ran.stdout.split())
    assert at_first < 100  # of 65,536
    assert 512 <= written < 2048  # 2 MiB, by huge pages perhaps
