"""GRPO steps of realign and of TRL on the same work, in alternation: `python -m benchmarks.peer`."""
