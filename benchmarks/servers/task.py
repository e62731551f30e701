"""Models and servers of the parts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from realign.api import MicroBatchSpec, Model, SequenceSample
from realign.demo import arithmetic
from realign.engines import TransformersModel
from realign.interfaces.components.scoring import score_logprobs
from realign.samplers.servers.vllm import Vllm

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "KMP_BLOCKTIME": "0",
    "HF_HUB_OFFLINE": "1",
}
# vLLM 0.32 fails on a CPU if it reads the prompt of a seeded request in several parts. 64 prompts fit into one batch.
ARGUMENTS = "--enforce-eager --max-num-seqs 64 --max-num-batched-tokens 16384"


def sampling(words: Mapping[str, str], length: int, *, dtype: str = "float32", **settings: Any) -> Vllm:
    """Return settings for vLLM on a CPU.

    Args:
        words: arguments of the benchmark.
        length: maximum number of tokens of a prompt and its response.
        dtype: dtype in which vLLM computes.
        settings: further settings.
    """
    if words["launch"]:  # a fake, for tests
        return Vllm(launch=words["launch"], **settings)
    arguments = f"--dtype {dtype} {ARGUMENTS} --max-model-len {length}"
    return Vllm(python=words["python"], arguments=arguments, environment=ENVIRONMENT, untie=True, **settings)


def prepared(folder: Path) -> arithmetic.Task:
    """Write the demo's additions."""
    return arithmetic.prepare(folder / "task", seed=0, demonstrations=7000)


def loaded(path: Path, seed: int) -> Model:
    """Load a model, and change its weights by a seed, so that each seed is another policy."""
    model = TransformersModel(path=str(path)).load("actor", seed=0)
    generator = torch.Generator().manual_seed(seed)
    weights = model.engine.weights()
    model.engine.load_weights(
        {name: x + 0.02 * seed * torch.randn(x.shape, generator=generator) for name, x in weights.items()}
    )
    return model


def prompts(count: int, length: int = 5, words: int = 12) -> SequenceSample:
    """Return random prompts."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(2, words, (count, length), generator=generator).tolist()
    return SequenceSample.from_sequences([f"p{i}" for i in range(count)], {"prompt_ids": [[row] for row in rows]})


def largest_gap(model: Model, sample: SequenceSample, temperature: float) -> float:
    """Return the largest difference between the log-probs of a sample and those of the training engine."""
    own_T = score_logprobs(model, sample, MicroBatchSpec(), temperature)["logprobs"]
    mask_T = sample["loss_mask"]
    return float((own_T - sample["logprobs"])[mask_T].abs().max())
