"""Run tests on the virtual device, so that device=auto is CUDA: `pytest -p tests.virtual_cuda.plugin`.

With VIRTUAL_CUDA_FP32=1, dtype=auto is float32, for tests that compare with results of float32.
"""

from __future__ import annotations

import os

from tests.virtual_cuda import device

device.install()
if os.environ.get("VIRTUAL_CUDA_FP32"):
    from realign.models import device as precision

    precision.supports_bfloat16 = lambda device: False  # type: ignore[assignment]
