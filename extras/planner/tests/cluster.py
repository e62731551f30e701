"""A cluster with round numbers, so that predictions can be computed by hand."""

from __future__ import annotations

from dataclasses import replace

import torch

from realign.engines.memory import MemoryModel
from realign.engines.training.optimizer import OptimizerSpec
from realign.models.model_shape import ModelShape
from realign_planner.options import Accelerator, Assumed, Device, PlanOptions
from realign_planner.predict import Cluster
from realign_planner.simulator import NetworkSizes, Tail, Work
from realign_planner.workload import CallLoad, RoleLoad, Workload

NETWORK = NetworkSizes(weights=100.0, layers=5, kv_heads=1, head_size=1, hidden=10, number_bytes=2)
SHAPE = ModelShape(
    family="round",
    parameters=100,
    in_layers=100,
    in_experts=0,
    experts=0,
    experts_per_token=0,
    matrices=100,
    trained=100,
    adapters=0,
    layers=5,
    sizes=(20, 20, 20, 20, 20),
    hidden=10,
    queries=8,
    keys=8,
    heads=8,
    mlp=16,
    mlp_tensors=4,
    layer_norms=False,
    qk_norm=False,
    words=10,
    embeddings=0,
    tied=False,
    head_trains=False,
    norms_train=True,
    unpacked=False,
    pair_tensors=0,
)
MODEL = MemoryModel(SHAPE, torch.device("cuda"), torch.bfloat16)
ASSUMED = Assumed(
    bandwidth_used=1.0,
    flops_used=0.5,
    decode_call_s=1.0,
    train_call_s=3.0,
    sync_call_s=2.0,
    link_used=0.5,
    in_process_layer_s=0.2,
    tensor_parallel_layer_s=0.1,
    collective_s=0.5,
    host_rate=20.0,
    memory_used=1.0,
)
DEVICE = Device(Accelerator(flops=100.0, bandwidth=10.0, memory=1e9, link=4.0, node_link=1e9), ASSUMED)
ACTOR, REF = (
    RoleLoad("actor", NETWORK, replace(MODEL, optimizer=OptimizerSpec()), trained=1.0),
    RoleLoad("ref", NETWORK, MODEL),
)
LOAD = Workload(
    work=Work(4, 2, 0, 10, Tail(20.0, 0.0, 20.0)),
    roles={"actor": ACTOR, "ref": REF},
    calls=(CallLoad("ref_inf", "ref", 2.0), CallLoad("actor_train", "actor", 6.0, 1, ("ref_inf",))),
    sampled="actor",
    sampling_calls=("actor_gen",),
    reward_calls=(),
    longest_prompt=20,
    budget=10**6,
)
CLUSTER = Cluster(PlanOptions(devices=8), DEVICE)
