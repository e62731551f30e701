"""One experiment in several runtimes, with asynchronous rollout and killed processes: `python -m benchmarks.scale`."""
