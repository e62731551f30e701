"""realign: reinforcement learning for language models on packed sequences, with one file per algorithm."""
