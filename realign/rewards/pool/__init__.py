"""Worker processes that run reward functions with time and memory limits."""
