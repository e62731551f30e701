"""Allocation of devices: predict the throughput and memory of placements before a run (`realign plan`).

- `plans`, `costs`, `simulator`: discrete-event simulation of the runtime.
- `devices`, `roofline`: costs that follow from data sheets, and the assumptions behind them.
"""
