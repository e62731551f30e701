"""The prompts of a run, and when their responses are sampled."""
