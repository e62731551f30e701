"""Compare the memory formula with the tensors of loaded models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import LlamaConfig

from realign.api import GenerationConfig, Lengths, MicroBatchSpec, SequenceSample
from realign.api.memory import EstimatesMemory, MemoryWork
from realign.engines import OptimizerSpec, TorchOptimizer, TransformersModel
from realign.engines.memory import MemoryModel, moment_bytes
from realign.models import Causal, QHeads, Value, ValueHead
from realign.models.model_shape import shape_of
from realign.models.network import decoder
from realign.models.network.kv_cache import KVCache
from realign.models.network.passes import SharedPrompts
from realign.samplers import InProcessSampling
from realign.samplers.in_process.compiled.library import CompiledDecode
from tests.flash_stand_in import compute_as_on_a_gpu
from tests.tiny import random_sample, save_tiny, tiny_config, tiny_engine

CPU = torch.device("cpu")
WORK = MemoryWork(trains=True, scores=False, samples=False, tokens=64, optimizer_step_tokens=64)


def model(family="llama", **settings):
    shape = shape_of(tiny_config(family), Causal(), trainable=settings.get("optimizer") is not None)
    return MemoryModel(shape, CPU, torch.float32, **settings)


@pytest.mark.parametrize(
    ("optimizer", "size"),
    [
        (OptimizerSpec(), 8),
        (TorchOptimizer(of="torch.optim.SGD"), 0),
        (TorchOptimizer(of="torch.optim.SGD", arguments={"momentum": 0.9}), 4),
        (TorchOptimizer(of="torch.optim.Muon"), 4),
    ],
)
def test_the_state_of_an_optimizer_is_measured(optimizer, size):
    assert moment_bytes(optimizer) == size


@pytest.mark.parametrize("head", [None, ValueHead(), ValueHead(layers=1), ValueHead(hidden="mlp", q_heads=QHeads())])
def test_memory_between_calls_is_that_of_a_trained_engine(tmp_path, head):
    path = save_tiny(tmp_path / "model")
    spec = TransformersModel(str(path), head=Causal(head), optimizer=OptimizerSpec(lr=1e-3, ema_decay=0.9))
    assert isinstance(spec, EstimatesMemory)
    engine = spec.load("actor", seed=0).engine

    def loss(out, data):
        values = 0.0 if head is None else out.values().sum()
        if head is not None and head.q_heads is not None:
            values = values + out.q_values().online_KT.sum()
        return out.logprobs().sum() + values, {}

    engine.train_batch(random_sample([[6, 5]]), MicroBatchSpec(), loss, lambda data: torch.tensor(1.0))
    kept = sum(x.numel() * x.element_size() for x in engine.resident() if x.numel() > 1)
    memory = spec.memory("actor", WORK)
    assert memory.device == "cpu"
    assert memory.kept == pytest.approx(kept, rel=0.01)
    assert memory.gradients == memory.average


def saved_bytes(run, engine):
    """Return the bytes of distinct tensors that autograd saves in a call, without those of weights."""
    kept, weights = {}, {p.untyped_storage().data_ptr() for p in engine.network.parameters()}

    def keep(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights and x.numel() > 512:
            kept[storage.data_ptr()] = (storage.nbytes(), x)
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        run()
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "bloom", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_the_tensors_that_autograd_saves(monkeypatch, family, dtype):
    compute_as_on_a_gpu(monkeypatch)
    engine = tiny_engine(family, optimizer=OptimizerSpec(lr=1e-3), dtype=dtype, shared_prompts=SharedPrompts.off)
    data = random_sample([[60], [60]])
    tokens = data.lengths["input_ids"].total
    shape = shape_of(tiny_config(family), Causal())
    estimate = MemoryModel(shape, CPU, dtype, optimizer=OptimizerSpec(lr=1e-3))
    work = replace(WORK, tokens=tokens, response=60)
    saved = saved_bytes(lambda: engine.network.run(data, data, training=True).hidden_RH, engine)
    cast = 2 * shape.in_layers if dtype == torch.bfloat16 else 0
    working = tokens * (3 * shape.mlp * dtype.itemsize + 4 * shape.hidden) + estimate._running_pairs(tokens, work)
    assert estimate._activations(tokens, work) - working == pytest.approx(saved - cast, rel=0.2)


SMOLLM2 = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    tie_word_embeddings=True,
)


@pytest.mark.parametrize("threads", [1, 2, 8, 64])
def test_the_first_program_of_the_readme_fits_in_8_gib(threads):
    shape = shape_of(SMOLLM2, Causal())
    work = MemoryWork(True, True, True, 3584, 3584, prompts=4, sequences=32, prompt=48, response=64)
    estimate = MemoryModel(shape, CPU, torch.float32, optimizer=OptimizerSpec(), lanes=threads).estimate(work)
    reference = 4 * shape.parameters
    assert estimate.kept + reference + estimate.passing < 8 * 2**30


def test_the_estimate_has_the_passes_of_the_engine():
    shape = shape_of(SMOLLM2, Causal())
    formula = MemoryModel(shape, CPU, torch.float32, optimizer=OptimizerSpec())
    sizes = (1277, 2000, 16384)
    short, longer, longest = (
        formula.estimate(replace(WORK, tokens=16384, optimizer_step_tokens=32768, sequence=n)).activations
        for n in sizes
    )
    assert [longer / short, longest / short] == pytest.approx([n / sizes[0] for n in sizes[1:]], rel=1e-6)
    small, on_gpu = (
        replace(formula, device=torch.device(d)).estimate(replace(WORK, tokens=16384, optimizer_step_tokens=32768))
        for d in ("cpu", "cuda")
    )
    assert on_gpu.activations == pytest.approx(16384 / sizes[0] * small.activations)


def test_models_that_run_unpacked_neither_copy_weights_for_rollouts_nor_run_concurrent_micro_batches():
    work = MemoryWork(True, False, True, 1024, 1024, prompts=8, sequences=64, prompt=32, response=32)
    packed, unpacked = (
        model(family, optimizer=OptimizerSpec(lr=1e-3), lanes=4).estimate(work) for family in ("llama", "bloom")
    )
    assert (packed.rollout_weights > 0, unpacked.rollout_weights) == (True, 0)
    assert unpacked.gradients == pytest.approx(unpacked.weights, rel=0.5)
    assert packed.gradients > 3 * packed.weights


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize("most", [None, 2])
def test_the_cache_is_the_one_of_a_rollout(monkeypatch, family, most):
    allocated = []

    class Counted(KVCache):
        def __init__(self, like, rows, length):
            super().__init__(like, rows, length)
            allocated.append(sum(x.numel() * x.element_size() for kv in self._layers.values() for x in kv))

    engine = tiny_engine(family, sampling=InProcessSampling(max_slots=most))
    monkeypatch.setattr(decoder, "KVCache", Counted)
    data = SequenceSample(("a", "b")).with_data({"prompt_ids": torch.arange(3, 13)}, lengths=Lengths.of([[6], [4]]))
    engine.generate(data, GenerationConfig(n=3, max_new_tokens=7), seed=0)
    work = MemoryWork(False, False, True, 13, 13, prompts=2, sequences=6, prompt=6, response=7)
    assert model(family, sampling=InProcessSampling(max_slots=most)).estimate(work).cache == allocated[0]


def test_frozen_roles_need_no_gradients_and_scalar_heads_no_logits(tmp_path):
    path = save_tiny(tmp_path / "value", head="value")
    frozen = TransformersModel(str(path), head=Value()).memory(
        "critic", MemoryWork(trains=False, scores=True, samples=False, tokens=64, optimizer_step_tokens=64)
    )
    assert (frozen.gradients, frozen.moments, frozen.activations, frozen.head) == (0, 0, 0, 0)
    assert 0 < frozen.passing == frozen.scoring
    language = model().estimate(MemoryWork(False, True, False, 64, 64))
    assert language.scoring > frozen.scoring


def test_ranks_divide_weights_and_state_but_sample_from_a_whole_copy():
    one, two = (
        model(optimizer=OptimizerSpec(lr=1e-3)).estimate(
            MemoryWork(True, False, True, 64, 64, prompts=1, sequences=1, prompt=4, response=4, ranks=ranks)
        )
        for ranks in (1, 2)
    )
    assert two.kept - two.sampling_copy == pytest.approx(one.kept / 2, rel=0.01)
    assert two.sampling_copy == one.weights


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
@pytest.mark.parametrize("keeps", [True, False])
def test_ranks_gather_fused_layers_in_the_dtype_of_products_and_others_in_fp32(dtype, size, keeps):
    work = MemoryWork(False, False, True, 64, 64, prompts=1, sequences=1, prompt=4, response=4, ranks=2)
    shape = shape_of(tiny_config("llama"), Causal())
    outer, head = 4 * (shape.parameters - shape.in_layers), size * shape.words * shape.hidden
    fused = MemoryModel(shape, CPU, dtype, keep_rollout=keeps).estimate(work)
    copy, library = outer + size * shape.in_layers, 4 * shape.in_layers if dtype == torch.float32 else 0
    assert fused.sampling_copy == (copy if keeps else 0)
    assert fused.sampling_copy + fused.rollout_weights == copy + library + 4 * shape.layer + head
    modules = MemoryModel(shape, CPU, dtype, keep_rollout=keeps, fused_rollout=False).estimate(work)
    casts = 2 * shape.in_layers + head if size == 2 else 0
    assert modules.sampling_copy + modules.rollout_weights == 4 * shape.parameters + casts


def test_a_rollout_of_rounded_weights_has_the_librarys_copy_or_those_of_torch():
    work = MemoryWork(False, False, True, 64, 64, prompts=1, sequences=1, prompt=4, response=4)
    shape = shape_of(tiny_config("llama"), Causal())
    layers, head = shape.in_layers, shape.words * shape.hidden
    for compiled, more in ((CompiledDecode.auto, 2 * layers), (CompiledDecode.off, 6 * (layers + head))):
        sampling = InProcessSampling(compiled_decode=compiled)
        memory = MemoryModel(shape, CPU, torch.float32, rounded=True, sampling=sampling).estimate(work)
        assert memory.rollout_weights == more + 4 * (layers + head)


def test_weights_in_4_bits_are_an_eighth_of_the_matrices():
    shape = shape_of(tiny_config("llama"), Causal(), trainable=False)
    whole, small = (
        MemoryModel(shape, CPU, torch.float32, load_in_4bit=flag).estimate(WORK).weights for flag in (False, True)
    )
    assert whole - small == pytest.approx((4 - 0.516) * shape.matrices, abs=1)


def test_the_cache_of_a_gpu_is_a_fraction_of_what_the_weights_leave(monkeypatch):
    shape = shape_of(tiny_config("llama"), Causal(), trainable=False)
    on_gpu = MemoryModel(shape, torch.device("cuda"), torch.bfloat16, sampling=InProcessSampling(cache_fraction=0.25))
    work = MemoryWork(False, False, True, 64, 64, prompts=10**4, sequences=10**6, prompt=16, response=16, free=2**27)
    memory = on_gpu.estimate(work)
    left = 2**27 - memory.kept - memory.rollout_weights
    row = 2 * shape.cache_token * 32
    assert memory.cache == left // 4 // row * row


def test_rounded_weights_are_kept_in_both_precisions():
    shape = shape_of(tiny_config("llama"), Causal())
    plain, rounded = (
        MemoryModel(shape, CPU, torch.float32, rounded=r, optimizer=OptimizerSpec(lr=1e-3)) for r in (0, 1)
    )
    more = rounded.estimate(WORK).casts - plain.estimate(WORK).casts
    assert more == (4 + 2) * (shape.in_layers + shape.words * shape.hidden)
