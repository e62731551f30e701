"""Collect the tests of this folder only where the device is installed (`-p tests.virtual_cuda.plugin`)."""

from __future__ import annotations

import sys

if "tests.virtual_cuda.plugin" not in sys.modules:
    collect_ignore_glob = ["test_*.py"]
