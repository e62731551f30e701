"""Processes that run reward functions, with limits."""
