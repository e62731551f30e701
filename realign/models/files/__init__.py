"""Model folders: paths, weights and tokenizers, and checks before loading."""
