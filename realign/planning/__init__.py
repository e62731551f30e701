"""Allocation of devices: predict the throughput and memory of placements before a run (`realign plan`).

- `plans`, `costs`, `simulator`: discrete-event simulation of the runtime.
- `devices`, `roofline`: costs that follow from data sheets, and the assumptions behind them.
- `workload`, `memory`: sizes of the models and calls of an experiment, and memory per device.
- `measured`: factors between measured and analytic costs, from the metrics of runs.
- `placements`, `predict`, `search`: placements and their overrides, predictions, and the search for the best ones.
- `options`: options of `realign plan`.
"""
