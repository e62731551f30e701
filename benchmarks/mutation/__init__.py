"""Mutation testing of the package's arithmetic and wiring; see `__main__` for the commands."""
