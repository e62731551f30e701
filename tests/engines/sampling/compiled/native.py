"""Marks tests that need a C++ compiler. The library is built once per process, and cached between test sessions."""

from __future__ import annotations

import pytest

from realign.engines.sampling.compiled.library import COMPILERS, find_compiler

requires_compiler = pytest.mark.skipif(
    find_compiler() is None, reason=f"no C++ compiler is installed (CXX, {', '.join(COMPILERS)})"
)
