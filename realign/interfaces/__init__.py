"""The algorithms, one file each: interface classes, their hyper-parameters, and the graph they need.

They import `realign.api`, `realign.functional` and reward functions; never an engine, the runtime or the config.
"""
