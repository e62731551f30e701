"""Checks of an experiment before anything is loaded, and of its data once it is."""
