"""Allocation of devices: predict the throughput and memory of placements before a run (`realign plan`).

- `options`: options of `realign plan`, the rates of devices from data sheets, and the assumptions besides them.
- `simulator`: discrete-event simulation of the runtime, and the costs that it adds up.
- `workload`, `placement_memory`, `traffic`: models and calls of an experiment, memory per device, and bytes sent.
- `measured`: factors between measured and analytic costs, from the metrics of runs.
- `placements`, `predict`, `search`: placements and their overrides, predictions, and the search for the best ones.
"""
