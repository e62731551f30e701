"""GRPO with vLLM as sampler: curves beside those of the in-process sampler, log-probs, updates and killed servers."""
