"""Tiny models that learn in minutes on a laptop: addition (`python -m realign.demo`), reviews (`realign.demo.rlhf`)."""
