"""The algorithms, one file each: interface classes, their hyper-parameters, and the graph they need.

Each is imported from its file, beside its own graph: `from realign.interfaces.ppo import PPOActorInterface, dataflow`.
They import `realign.api`, `realign.functional` and reward functions; never an engine, the runtime or the config.
"""
