from __future__ import annotations

import numpy as np
import pytest
import torch

from realign.api import GenerationConfig, Lengths, MicroBatchSpec, SequenceSample
from realign.engines import OptimizerSpec
from realign.errors import ConfigError, DataError
from realign.models.network.images import place
from realign.samplers.in_process.settings import InProcessSampling
from tests.images import (
    IMAGE,
    MERGE,
    image_prompts,
    image_sample,
    random_images,
    random_prompt,
    tiny_image_engine,
    tiny_image_model,
)
from tests.tiny import tiny_engine

FAMILIES = ("qwen2_vl", "qwen2_5_vl")
SIZES = [[(2, 3)], [], [(3, 3), (1, 2)], [(2, 2)]]
"""Sizes of the images of four prompts, of which one has none and one has two."""
RESPONSES = [[4, 2, 3], [5], [1, 6], [3, 3]]
EXACT = {"rtol": 0, "atol": 2e-5}


def own_inputs(model, ids, pixels, grids):
    """Return the inputs of transformers' own forward pass."""
    inputs = {"input_ids": ids[None], "use_cache": False}
    if len(grids):
        kinds = (ids[None] == IMAGE).int()
        inputs |= {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": kinds}
    return inputs


def alone(model, data):
    """Return the log-probs of each sequence in a separate pass, by transformers."""
    owners, logprobs = data.group_index().tolist(), []
    pixels, grids = data.sequences("pixel_values"), data.sequences("image_grid_thw")
    for owner, ids in zip(owners, data.sequences(), strict=True):
        model.model.rope_deltas = None
        logits = model(**own_inputs(model, ids, pixels[owner], grids[owner])).logits[0].log_softmax(-1)
        logprobs.append(torch.cat([logits.new_zeros(1), logits[:-1].gather(1, ids[1:, None])[:, 0]]))
    return torch.cat(logprobs)


def scored(engine, data, **spec):
    done = engine.forward(data, MicroBatchSpec(**spec), lambda out, part: part.with_tokens(again=out.logprobs()))
    return done["again"]


def negative_likelihood(out, part):
    return -out.logprobs(where_T=part["loss_mask"]).sum(), {}


def trained_tokens(part):
    return part["loss_mask"].sum()


@pytest.mark.parametrize("seed", range(5))
def test_positions_are_those_of_transformers(seed):
    generator = np.random.default_rng(seed)
    sizes = [tuple(generator.integers(1, 5, 2).tolist()) for _ in range(seed)]
    ids, (_, grids) = torch.tensor(random_prompt(sizes, generator)), random_images(sizes, seed)
    placed = place(ids.numpy(), grids.numpy(), IMAGE, MERGE)
    if not sizes:
        assert (placed.positions_3L == np.arange(len(ids))).all()
        assert placed.next == len(ids)
        return
    model = tiny_image_model()
    wanted, shift = model.model.get_rope_index(ids[None], (ids[None] == IMAGE).int(), image_grid_thw=grids)
    assert (placed.positions_3L == wanted[:, 0].numpy()).all()
    assert placed.next == len(ids) + int(shift)
    assert placed.features_L[placed.features_L >= 0].tolist() == list(range(sum(h * w for h, w in sizes)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [None, 40])
def test_packed_gradients_equal_those_of_each_sequence_alone(family, budget):
    data = image_sample(SIZES, RESPONSES)
    engine = tiny_image_engine(family, optimizer=OptimizerSpec(lr=1e-3))
    weight = trained_tokens(data)
    engine.accumulate(data, MicroBatchSpec(max_tokens_per_microbatch=budget), negative_likelihood, weight)
    model = tiny_image_model(family, attention="eager")
    (-alone(model, data)[data["loss_mask"]].sum() / weight).backward()
    wanted = dict(model.named_parameters())
    assert any(name.startswith("model.visual") and p.grad.abs().max() > 1e-4 for name, p in wanted.items())
    for name, parameter in engine.module.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=1e-3, atol=1e-5, msg=name)


def test_prompts_of_equal_tokens_have_their_own_images():
    data = image_sample([[(2, 3)]] * 3, [[4, 2], [5], [3]])
    prompt = data.sequences()[0][:-4]
    texts = [torch.cat([prompt, torch.tensor(own)]) for own in ([5, 6, 7], [5, 9], [8], [5, 6])]
    lengths = Lengths.of([[len(texts[0]), len(texts[1])], [len(texts[2])], [len(texts[3])]])
    alike = SequenceSample(data.ids).with_data({"input_ids": torch.cat(texts)}, lengths=lengths)
    alike = alike.merge(data.select(["pixel_values", "image_grid_thw"]))
    again, wanted = scored(tiny_image_engine(), alike), alone(tiny_image_model(attention="eager"), alike)
    torch.testing.assert_close(again, wanted, **EXACT)
    assert not torch.allclose(wanted[len(prompt)], wanted[lengths.starts[2] + len(prompt)])


@pytest.mark.parametrize("slots", [None, 2])
def test_sampled_log_probs_equal_rescored_ones(slots):
    engine, prompts = tiny_image_engine(sampling=InProcessSampling(max_slots=slots)), image_prompts(SIZES)
    out = engine.generate(prompts, GenerationConfig(n=3, max_new_tokens=12, temperature=1.0), seed=0)
    whole = out.merge(prompts.select(["pixel_values", "image_grid_thw"]))
    assert (out["input_ids"][out["loss_mask"]] == IMAGE).any()  # sampled image tokens are text
    torch.testing.assert_close(scored(engine, whole)[out["loss_mask"]], out["logprobs"][out["loss_mask"]], **EXACT)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family):
    prompts = image_prompts(SIZES)
    config = GenerationConfig(max_new_tokens=8, greedy=True, fixed_length=True)
    out = tiny_image_engine(family).generate(prompts, config, seed=0)
    model = tiny_image_model(family, attention="eager")
    pixels, grids = prompts.sequences("pixel_values"), prompts.sequences("image_grid_thw")
    for i, (ids, sampled) in enumerate(zip(prompts.sequences("prompt_ids"), out.sequences(), strict=True)):
        model.model.rope_deltas = None
        inputs = {**own_inputs(model, ids, pixels[i], grids[i]), "use_cache": True}
        wanted = model.generate(**inputs, max_new_tokens=8, min_new_tokens=8, do_sample=False)[0]
        assert sampled.tolist() == wanted.tolist()


def test_a_prompt_with_too_few_image_tokens_is_rejected():
    prompts = image_prompts([[(2, 2)]])
    text = prompts["prompt_ids"][prompts["prompt_ids"] != IMAGE]
    cut = prompts.with_data({"prompt_ids": text}, lengths=Lengths.of([[len(text)]]))
    with pytest.raises(DataError, match="'p0': the prompt has 0 image tokens, but its images have 4 merged patches"):
        tiny_image_engine().generate(cut, GenerationConfig(max_new_tokens=2), seed=0)


def test_a_model_of_another_family_rejects_images():
    data = image_sample([[(2, 2)]], [[3]])
    with pytest.raises(ConfigError, match="does not read images"):
        scored(tiny_engine(), data)
    with pytest.raises(ConfigError, match="does not read images"):
        tiny_engine().generate(image_prompts([[(2, 2)]]), GenerationConfig(max_new_tokens=2), seed=0)
