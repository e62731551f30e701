"""One experiment in several runtimes, with rollouts ahead, and killed: `python -m benchmarks.scale`."""
