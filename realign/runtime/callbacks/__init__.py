"""Callbacks that realign ships. The config selects them by a word, such as `callbacks.stop=early_stopping`."""

from realign.runtime.callbacks.early_stopping import EarlyStopping, Goal

__all__ = ["EarlyStopping", "Goal"]
