"""Folders of models: names, weights, tokenizers and what is known about them before loading."""
