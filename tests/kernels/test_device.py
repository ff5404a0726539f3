"""The choice of an implementation: Triton is imported when a tensor on a GPU asks for it, and done without where there is none."""

import pkgutil
import subprocess
import sys

import kernels
from kernels import device, reference


def test_importing_kernels_needs_no_triton():
    names = [f"kernels.{x.name}" for x in pkgutil.iter_modules(kernels.__path__) if x.name not in ("aot", "triton")]
    program = f"import sys; sys.modules['triton'] = None; import {', '.join(names)}"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_without_triton_a_gpu_gets_plain_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    device.accelerated.cache_clear()
    try:
        assert device.accelerated("kv_write", "kv_write") is reference.kv_write
        assert device.accelerated("rms_norm", "add_rms_norm") is reference.add_rms_norm
    finally:
        device.accelerated.cache_clear()
