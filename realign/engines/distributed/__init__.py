"""Distributed training: ranks, sharded weights, full copies and offloading."""
