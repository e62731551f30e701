"""The processes of a run: rendezvous, placement, watchdog, signals and locks."""
