"""realign: reinforcement learning for language models; one algorithm, one file, on packed sequences."""
