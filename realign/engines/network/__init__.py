"""One transformers model on packed rows: attention, heads, adapters, branches and outputs."""
