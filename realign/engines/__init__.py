"""Engines: machines that run a transformers model on packed sequences. They know no algorithm.

`loading` turns a config into an engine; `engine` cuts, packs, runs and steps; `attention` is the one function through
which every model attends; `output` is what a loss sees of a forward pass; `optim` holds optimizers and schedules.
"""
