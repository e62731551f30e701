"""Answer AReaL's allocation strings, such as `sglang:d4t2+fsdp:d8`, with the settings that mean the same here."""

from __future__ import annotations

import math
import re

_PART = re.compile(r"(?:(sglang|vllm|fsdp|megatron|archon)(?:\[\w+\])?[:.])?((?:[dtmpce]\d+)+)")
_SERVERS = ("sglang", "vllm")
MACHINE = 8
"""Devices of a machine, up to which the answer numbers them."""


def allocation_answer(value: str) -> str | None:
    """Return what to run instead of an allocation string; None for a form that is not known here.

    Known are one part that trains, one part of servers, or both: `+` gives them separate devices, `|` the same ones.
    """
    parts = re.split(r"[+|]", value)
    matches = [_PART.fullmatch(part) for part in parts]
    backends = [match[1] or "" for match in matches if match]
    servers = [backend for backend in backends if backend in _SERVERS]
    if len(backends) != len(parts) or len(servers) > 1 or len(parts) - len(servers) > 1:
        return None
    sizes = [{name: int(n) for name, n in re.findall(r"([a-z])(\d+)", match[2])} for match in matches if match]
    trained, sampled = {"d": 0}, {"d": 0}  # a part that is absent has no devices
    for backend, size in zip(backends, sizes, strict=True):
        (sampled if backend in servers else trained).update({"d": 1} | size)
    # `m` is realhf's letter for tensor parallelism; experts are spread over the other devices
    ranks = math.prod(n for name, n in trained.items() if name != "e")
    words, notes = list[str](), list[str]()
    of_server = math.prod(n for name, n in sampled.items() if name in "tmp")
    numbered = ranks + sampled["d"] * of_server <= MACHINE and "|" not in value
    if ranks:
        visible = f"CUDA_VISIBLE_DEVICES={_numbers(0, ranks)} " if servers and numbered else ""
        words.append(f"{visible}torchrun --nproc-per-node {ranks} -m realign")
        dims = {"tensor": trained.get("t", trained.get("m", 1)), "context": trained.get("c", 1)}
        dims |= {"expert": trained.get("e", 1), "pipeline": trained.get("p", 1)}
        words += [f"models.actor.sharding.{name}={n}" for name, n in dims.items() if n > 1]
    if ranks > MACHINE:
        notes.append(f"For several machines, divide the {ranks} ranks by --nnodes.")
    for backend in servers:
        words += [f"models.actor.sampler={backend}", f"models.actor.sampler.servers={sampled['d']}"]
        if "|" in value:
            words.append("models.actor.sampler.sleep_level=1")
        elif numbered and ranks:
            starts = range(ranks, ranks + sampled["d"] * of_server, of_server)
            devices = ",".join(f'"{_numbers(start, start + of_server)}"' for start in starts)
            words.append(f"'models.actor.sampler.devices=[{devices}]'")
        elif ranks:
            notes.append("Set models.actor.sampler.devices, or start the servers yourself and set sampler.urls.")
        flags = {"tensor": sampled.get("t", sampled.get("m", 1)), "pipeline": sampled.get("p", 1)}
        arguments = " ".join(f"--{name}-parallel-size {n}" for name, n in flags.items() if n > 1)
        words += [f"'models.actor.sampler.arguments={arguments}'"] if arguments else []
    return " ".join([f"`{' '.join(words)}` means the same.", *notes])


def _numbers(start: int, end: int) -> str:
    return ",".join(map(str, range(start, end)))


__all__ = ["allocation_answer"]
