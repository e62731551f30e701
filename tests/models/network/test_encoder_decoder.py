from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from realign.api import GenerationConfig, MicroBatchSpec, SequenceSample
from realign.api.sampler import PROMPTS
from realign.engines import OptimizerSpec, TransformersModel
from realign.errors import ConfigError, DataError
from realign.models import Causal, ValueHead
from realign.models.network.trains import Lora, TopLayers
from realign.models.network.value_head import ValueNetwork
from realign.samplers.in_process.settings import InProcessSampling
from tests.encoder_decoders import FAMILIES, family_pair, own_logprobs, sample_of, save_pair, tiny_pair
from tests.tiny import VOCAB, engine_over

SHAPE = [[(5, 4), (5, 1), (5, 9)], [(1, 6), (12, 0)], [(8, 3), (2, 11)]]
"""Lengths of prompts and responses; one sequence has no response."""
VERIFIED = ("blenderbot", "blenderbot-small", "led", "longt5", "m2m_100", "marian", "mbart", "mt5", "mvp", "pegasus")
VERIFIED += ("plbart",)


def engine_of(family, model=None, **settings):
    return engine_over(tiny_pair(family, **(model or {})), **settings)


def scored(engine, data, **spec):
    return engine.forward(data, MicroBatchSpec(**spec), lambda out, part: part.with_tokens(again=out.logprobs()))[
        "again"
    ]


def expected(model, data):
    """Return the log-probs of the responses, packed, from the forward pass of transformers with labels."""
    logprobs = []
    for ids, mask in zip(data.sequences("input_ids"), data.sequences("loss_mask"), strict=True):
        prompt = int((~mask).sum())
        if prompt < len(ids):
            logprobs.append(own_logprobs(model, ids, prompt))
    return torch.cat(logprobs)


def negative_likelihood(out, part):
    return -out.logprobs(where_T=part["loss_mask"]).sum(), {}


def responses(part):
    return part["loss_mask"].sum().float()


def greedy_response(model, prompt, tokens):
    """Return the response that transformers generates."""
    names = ("eos_token_id", "forced_eos_token_id", "forced_bos_token_id")
    settings = {"do_sample": False, "num_beams": 1, "max_new_tokens": tokens, **dict.fromkeys(names)}
    return model.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), **settings)[0, 1:].tolist()


def prompts_of(*lengths):
    drawn = [torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    return SequenceSample.from_sequences([f"{n}" for n in lengths], {PROMPTS: [[p] for p in drawn]}), drawn


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_equal_those_of_transformers_with_labels_and_are_0_in_prompts(family):
    engine, data = engine_of(family), sample_of(SHAPE)
    got, mask = scored(engine, data), data["loss_mask"]
    with torch.no_grad():
        torch.testing.assert_close(got[mask], expected(tiny_pair(family), data), atol=1e-5, rtol=1e-5)
    assert not got[~mask].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_those_of_generate(family):
    engine, model = engine_of(family, sampling=InProcessSampling(max_slots=4)), tiny_pair(family)
    data, prompts = prompts_of(5, 9, 1)
    out = engine.generate(data, GenerationConfig(n=2, max_new_tokens=9, greedy=True, stop_token_ids=[]), seed=0)
    for s, ids in enumerate(out.sequences()):
        assert ids.tolist() == [*prompts[s // 2].tolist(), *greedy_response(model, prompts[s // 2], 9)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cached", [True, False])
def test_sampled_log_probs_equal_those_of_scoring_when_responses_end_at_different_times(family, cached):
    engine = engine_of(family, sampling=InProcessSampling(max_slots=5))
    assert engine.network.abilities.own_cache.cached
    engine.network.abilities.own_cache.cached = cached
    data, prompts = prompts_of(4, 8, 2)
    config = GenerationConfig(n=4, max_new_tokens=12, temperature=0.7, stop_token_ids=list(range(3, 20)))
    out = engine.generate(data, config, seed=3)
    assert len(set(out.lengths["input_ids"].flat.tolist())) > 3
    assert out["prompt_mask"].sum() == 4 * sum(map(len, prompts))

    def at_temperature(output, part):
        return part.with_tokens(again=output.logprobs(temperature=0.7, where_T=part["loss_mask"]))

    again = engine.forward(out, MicroBatchSpec(), at_temperature)["again"]
    torch.testing.assert_close(again, out["logprobs"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_resumed_training_is_bitwise_equal_to_uninterrupted_training(family):
    data, spec = sample_of(SHAPE), MicroBatchSpec(max_tokens_per_microbatch=25)
    first = engine_of(family, optimizer=OptimizerSpec(lr=1e-3))
    first.train_batch(data, spec, negative_likelihood, responses)
    state = copy.deepcopy(first.state_dict())
    second = engine_of(family, model={"seed": 1}, optimizer=OptimizerSpec(lr=1e-3))
    second.load_state_dict(state)
    for engine in (first, second):
        engine.train_batch(data, spec, negative_likelihood, responses)
    weights = second.weights()
    for name, x in first.weights().items():
        assert torch.equal(x, weights[name]), name


def test_a_value_head_reads_the_hidden_state_before_each_token_of_the_response():
    module = tiny_pair("t5")
    value = ValueNetwork(ValueHead(init="normal"), module, 64, module.config.vocab_size, seed=0)
    engine = engine_over(module, value_head=value)
    data = sample_of(SHAPE)

    def hook(out, part):
        return part.with_tokens(values=out.values()).with_sequences(last=out.scores())

    got = engine.forward(data, MicroBatchSpec(), hook)
    for s, (ids, mask) in enumerate(zip(data.sequences("input_ids"), data.sequences("loss_mask"), strict=True)):
        prompt = int((~mask).sum())
        if prompt == len(ids):
            continue
        read = torch.cat([torch.tensor([0]), ids[prompt:]])
        with torch.no_grad():
            out = module(input_ids=ids[None, :prompt], decoder_input_ids=read[None], output_hidden_states=True)
            want = value(out.decoder_hidden_states[-1][0])
        values = list(got.sequences("values"))[s]
        torch.testing.assert_close(values[prompt:], want[:-1], atol=1e-5, rtol=1e-5)
        assert not values[:prompt].any()
        torch.testing.assert_close(got["last"][s], want[-1], atol=1e-5, rtol=1e-5)


def test_a_model_that_is_loaded_from_a_folder_trains_with_adapters_and_its_reference_is_the_base_model(tmp_path):
    pytest.importorskip("peft")
    folder = save_pair("bart", tmp_path / "bart")
    spec = TransformersModel(str(folder), optimizer=OptimizerSpec(lr=1e-2), trains=Lora(rank=4))
    engine, data = spec.load("actor", seed=0).engine, sample_of(SHAPE)
    before = scored(engine, data)
    reference = engine.reference()
    engine.train_batch(data, MicroBatchSpec(), negative_likelihood, responses)
    assert not torch.equal(scored(engine, data), before)
    base = reference(data, MicroBatchSpec(), lambda out, part: part.with_tokens(again=out.logprobs()))
    torch.testing.assert_close(base["again"], before)
    engine.save(tmp_path / "merged")
    with torch.no_grad():
        want = expected(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "merged").eval(), data)
    torch.testing.assert_close(scored(engine, data)[data["loss_mask"]], want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ([True, True, True], "no prompt, or the loss includes its prompt"),
        ([False, True, False, True], r"several responses.*data\.train_on_turns=last"),
        (None, "needs the key 'loss_mask'"),
    ],
)
def test_a_sequence_that_is_not_a_prompt_with_one_response_is_an_error(masks, message):
    data = SequenceSample.from_sequences(["a"], {"input_ids": [[torch.tensor([5, 6, 7, 8][: len(masks or "abc")])]]})
    if masks is not None:
        data = data.with_tokens(loss_mask=torch.tensor(masks))
    with pytest.raises(DataError, match=message):
        scored(engine_of("t5"), data)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head": "score"}, r"head=score: not supported by encoder-decoder models such as 't5'"),
        ({"head": "value"}, r"head=value: not supported by encoder-decoder models"),
        ({"head": "branch"}, r"models\.actor\.head\.value_head\.layers=1: not supported"),
        ({"trains": TopLayers(1)}, r"models\.actor\.trains=top_layers: not supported by encoder-decoder models"),
        ({"torch_compile": "eager"}, r"models\.actor\.torch_compile=eager: requires a model that can run packed"),
        ({"sampler": "vllm"}, r"models\.actor\.sampler: not supported by encoder-decoder models"),
        ({"compiled": True}, r"models\.actor\.sampler\.compiled_decode=on: not supported"),
    ],
    ids=str,
)
def test_a_setting_that_encoder_decoder_models_do_not_support_is_an_error(settings, message, tmp_path):
    from realign.models import Score, Value
    from realign.models.network.settings import TorchCompile
    from realign.samplers.in_process.compiled.library import CompiledDecode
    from realign.samplers.servers.vllm import Vllm

    heads = {"score": Score(), "value": Value(), "branch": Causal(value_head=ValueHead(layers=1))}
    values = {**settings}
    if "head" in values:
        values["head"] = heads[values["head"]]
    if "torch_compile" in values:
        values["torch_compile"] = TorchCompile(values["torch_compile"])
    if values.get("sampler") == "vllm":
        values["sampler"] = Vllm(urls=["http://127.0.0.1:1"])
    if values.pop("compiled", False):
        values["sampler"] = InProcessSampling(compiled_decode=CompiledDecode.on)
    spec = TransformersModel(str(save_pair("t5", tmp_path / "t5")), optimizer=OptimizerSpec(), **values)
    with pytest.raises(ConfigError, match=message):
        spec.load("actor", seed=0)


def test_a_model_whose_outputs_differ_from_its_last_layer_is_an_error():
    module = tiny_pair("t5")
    module.config.scale_decoder_outputs = False
    module.model_dim = 4
    module.lm_head.register_forward_hook(lambda layer, given, out: out * 2)
    with pytest.raises(ConfigError, match="is not supported: logits of padded batches differ"):
        engine_over(module)


@pytest.mark.slow
@pytest.mark.parametrize("family", VERIFIED)
def test_a_verified_family_samples_as_transformers_does_and_scores_as_it_samples(family):
    module = family_pair(family)
    engine = engine_over(module)
    assert engine.network.abilities.own_cache.cached == (family != "m2m_100")
    data, prompts = prompts_of(5, 9, 2)
    out = engine.generate(data, GenerationConfig(n=2, max_new_tokens=8, greedy=True, stop_token_ids=[]), seed=0)
    torch.testing.assert_close(scored(engine, out), out["logprobs"], atol=1e-5, rtol=1e-5)
    for s, ids in enumerate(out.sequences()):
        assert ids.tolist() == [*prompts[s // 2].tolist(), *greedy_response(module, prompts[s // 2], 8)]
