"""Checkpoints of a run, resuming from them, and saved models."""
