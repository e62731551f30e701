"""The in-process sampler: slots, KV cache, drawing tokens and stopping."""
