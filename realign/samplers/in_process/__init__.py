"""In-process sampler: decoding slots, KV cache, token sampling and stop conditions."""
