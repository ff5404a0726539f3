"""Kernels of a test module computed with other instructions than this processor's best."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
# what LLVM knows of a processor without AVX-512
AVX2 = "+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+64bit,+cx8,+cmov,+mmx,+fxsr"


def digest_with_avx2(module: str) -> str:
    """What the function `digest` of a test module returns in a process that compiles for AVX2 at most."""
    environment = {**os.environ, "NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": AVX2}
    command = [sys.executable, "-c", f"from {module} import digest; print(digest())"]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
