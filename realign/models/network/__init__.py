"""A transformers model on packed sequences: attention, heads, LoRA adapters, branches and outputs."""
