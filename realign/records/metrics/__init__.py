"""Metrics of a run: live display, files, trackers, curves and samples."""
