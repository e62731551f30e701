"""One experiment in several runtimes, with asynchronous rollout, and with killed processes: `python -m benchmarks.scale`."""
