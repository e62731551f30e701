"""Checks of an experiment before loading, and of its data after loading."""
