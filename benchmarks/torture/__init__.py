"""Failures on purpose, compared with undisturbed runs; `python -m benchmarks.torture` runs them (see `__main__`)."""
