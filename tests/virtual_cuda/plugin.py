"""Run tests on the virtual device, so that device=auto is CUDA: `pytest -p tests.virtual_cuda.plugin`."""

from __future__ import annotations

from tests.virtual_cuda import device

device.install()
