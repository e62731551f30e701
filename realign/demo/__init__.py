"""Demos that train tiny models in minutes on a laptop: addition (`realign.demo`) and reviews (`realign.demo.rlhf`)."""
