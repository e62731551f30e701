"""Learning curves of a real language model on three tasks, with controls (docs/studies/real-curves.md)."""
