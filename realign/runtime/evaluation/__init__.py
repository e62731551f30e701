"""Evaluations of a run: generated responses, losses, episodes, and reward calibration."""
