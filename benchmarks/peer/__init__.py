"""Comparison of training steps of realign and TRL on the same work: `python -m benchmarks.peer`."""
