"""Evaluations of a run: generated responses, losses, episodes, and calibration of rewards."""
