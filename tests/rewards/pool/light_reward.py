"""Reward function in a file without imports."""

import sys


def heavy_modules(prompt, response, row):
    heavy = [name for name in ("torch", "transformers", "numpy", "realign.api") if name in sys.modules]
    raise RuntimeError(f"heavy={heavy}")
