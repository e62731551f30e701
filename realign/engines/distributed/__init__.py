"""Ranks, sharded weights, whole copies and offloading."""
