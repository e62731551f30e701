"""Learning curves of the preset `lm_human_preferences` and of an independent implementation of its training loop."""
