"""Algorithms, one per file: interface classes, their hyperparameters, and their dataflow graph.

Import an interface and its graph from its file: `from realign.interfaces.ppo import PPOActorInterface, dataflow`.
Interfaces import `realign.api`, `realign.functional` and reward functions, but no engine, runtime or config.
"""
