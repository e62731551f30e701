from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers import GenerationConfig as TransformersGenerationConfig

from realign.api import GenerationConfig, SequenceSample
from realign.errors import ConfigError, DataError, RunError
from realign.functional.logprobs import LMHead
from realign.models.network import decoder
from realign.models.network.attention import ATTENTION
from realign.models.network.heads import read_head
from realign.models.network.kv_cache import KVCache
from realign.samplers.in_process import decode
from realign.samplers.in_process.generate import generate
from realign.samplers.in_process.rollout_model import RolloutModel
from realign.samplers.in_process.settings import InProcessSampling
from tests.samplers.in_process.rollouts import LENGTHS, UNTIED, prompts, responses, same, sample_of
from tests.tiny import FAMILIES, OTHERS, VOCAB, tiny_engine, tiny_model, tiny_tokenizer

EOS = 2


def rollout(model, prompt_list=None, *, seed=0, eos=(EOS,), tokenizer=None, max_slots=None, **config):
    data = sample_of(prompts() if prompt_list is None else prompt_list)
    config = GenerationConfig(**{"max_new_tokens": 24, **config})
    return generate(
        RolloutModel(model, read_head(model)),
        data,
        config,
        InProcessSampling(max_slots=max_slots),
        seed=seed,
        eos_token_ids=eos,
        tokenizer=tokenizer,
    )


def assert_logprobs_are_those_of(plain, out, temperature=1.0, atol=1e-5):
    """Compare with a forward pass of the model's own code over each single sequence."""
    for ids, logprobs, mask in zip(*(out.sequences(k) for k in ("input_ids", "logprobs", "loss_mask")), strict=True):
        with torch.no_grad():
            logits = plain(input_ids=ids[None], use_cache=False).logits[0] / temperature
        want = logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        assert torch.allclose(logprobs[1:][mask[1:]], want[mask[1:]], atol=atol)


def pair(family, **overrides):
    ours, plain = tiny_model(family, **overrides), tiny_model(family, attention="eager", **overrides)
    plain.load_state_dict(ours.state_dict())
    return ours, plain


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_sampled_logprobs_equal_a_plain_forward(family):
    ours, plain = pair(family)
    out = rollout(ours, n=3, max_slots=5, eos=range(2, 8), max_new_tokens=40, temperature=0.8)
    assert len({len(r) for r in responses(out)}) > 3  # responses end at different steps
    assert_logprobs_are_those_of(plain, out, temperature=0.8)


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "gemma2", "opt", "gpt_neox", "qwen3_moe"])
def test_greedy_equals_transformers_generate(family):
    ours, plain = pair(family, **UNTIED)
    eos = sorted({r[9] for r in responses(rollout(ours, greedy=True, eos=()))})[:2]
    got = responses(rollout(ours, greedy=True, eos=eos, max_slots=3))
    settings = TransformersGenerationConfig(do_sample=False, max_new_tokens=24, eos_token_id=eos, pad_token_id=0)
    for prompt, response in zip(prompts(), got, strict=True):
        want = plain.generate(prompt[None], attention_mask=torch.ones(1, len(prompt)), generation_config=settings)
        assert response == want[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", ["gemma2", "gpt2"])
def test_slots_and_prefill_do_not_change_greedy_results(family, monkeypatch):
    model = tiny_model(family, **UNTIED)
    free = responses(rollout(model, greedy=True, eos=()))
    config = {"greedy": True, "n": 3, "eos": [free[0][4], free[1][9], free[2][15]]}
    want = rollout(model, **config)
    assert len({len(r) for r in responses(want)}) > 2
    for slots in (1, 3, 100):
        got = rollout(model, max_slots=slots, **config)
        assert responses(got) == responses(want)
        assert torch.allclose(got["logprobs"], want["logprobs"], atol=1e-5)
    monkeypatch.setattr(decode, "PREFILL_TOKENS", 8)
    assert responses(rollout(model, **config)) == responses(want)
    monkeypatch.setattr(decode, "CACHE_BYTES", 1)
    assert responses(rollout(model, **config)) == responses(want)
    monkeypatch.setattr(decode, "LOGIT_ELEMENTS", 2 * VOCAB)
    assert responses(rollout(model, max_slots=7, **config)) == responses(want)


def test_the_cache_of_a_gpu_follows_from_its_free_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (600, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    assert decode.cache_bytes(torch.device("cuda"), 0.5) == 400
    assert decode.cache_bytes(torch.device("cuda"), 0.5, free=100) == 50
    assert decode.cache_bytes(torch.device("cpu"), 0.5) == decode.CACHE_BYTES


def test_cache_is_cut_to_a_memory_budget(monkeypatch):
    per_slot = 3 * 2 * (2 * 16) * (max(LENGTHS) + 24) * 4  # layers, keys and values, heads x size, tokens, bytes
    monkeypatch.setattr(decode, "CACHE_BYTES", 5 * per_slot + 1)
    seen = []

    class Counted(KVCache):
        def __init__(self, like, slots, length):
            seen.append(slots)
            super().__init__(like, slots, length)

    monkeypatch.setattr(decoder, "KVCache", Counted)
    out = rollout(tiny_model("llama"), n=3)
    assert seen == [5]
    assert out.n_sequences == 12


def test_layout_of_the_result():
    data = prompts()
    out = rollout(tiny_model(), n=3, eos=range(2, 12))
    assert out.ids == ("p0", "p1", "p2", "p3")
    assert out.keys == {"input_ids", "prompt_mask", "loss_mask", "logprobs", "truncated", "response_index"}
    assert out["response_index"].tolist() == [0, 1, 2] * 4
    assert [len(c) for c in out.lengths["input_ids"].as_tuples()] == [3, 3, 3, 3]
    assert out["truncated"].shape == (12,)
    assert [out[k].dtype for k in ("input_ids", "logprobs", "truncated")] == [torch.int64, torch.float32, torch.bool]
    assert torch.equal(out["prompt_mask"], ~out["loss_mask"])
    assert not out["logprobs"][out["prompt_mask"]].any()
    assert (out["logprobs"][out["loss_mask"]] < 0).all()
    for s, (ids, mask) in enumerate(zip(out.sequences(), out.sequences("prompt_mask"), strict=True)):
        prompt = data[s // 3]
        assert torch.equal(ids[: len(prompt)], prompt)
        assert mask.tolist() == [True] * len(prompt) + [False] * (len(ids) - len(prompt))
    group = responses(out)[:3]
    assert len({tuple(r) for r in group}) > 1


def test_frequencies_of_first_tokens():
    ours, plain = pair("llama")
    n = 20_000
    prompt = prompts()[2]
    drawn = rollout(ours, [prompt], n=n, max_new_tokens=1, temperature=0.7)["input_ids"].view(n, -1)[:, -1]
    with torch.no_grad():
        want_V = (plain(input_ids=prompt[None]).logits[0, -1].double() / 0.7).softmax(-1)
    counts_V = torch.bincount(drawn, minlength=VOCAB).double()
    common = want_V * n > 5
    chi_square = ((counts_V - n * want_V)[common] ** 2 / (n * want_V)[common]).sum()
    degrees = int(common.sum())
    assert degrees > 30
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5


def test_trap_a9_stop_tokens_in_prompts_and_equal_to_pad():
    model = tiny_model()
    model.config.pad_token_id = EOS
    stops = [EOS, 7, 8, 9, 10, 11, 12]
    with_stops = [torch.tensor([EOS, 5, EOS, 7]), torch.tensor([EOS]), torch.tensor([7, 7])]
    out = rollout(model, with_stops, n=4, eos=stops)
    for s, ids in enumerate(out.sequences()):
        prompt, response = with_stops[s // 4], responses(out)[s]
        assert torch.equal(ids[: len(prompt)], prompt)
        ended = response[-1] in stops
        assert not set(response[:-1]) & set(stops)
        assert ended or len(response) == 24
        assert bool(out["truncated"][s]) == (not ended)
    assert not out["truncated"].all()


def test_stop_token_ids_replace_the_models_own():
    model = tiny_model()
    free = responses(rollout(model, greedy=True, eos=()))
    stop = free[0][5]
    own = responses(rollout(model, greedy=True, eos=[stop]))
    assert own[0] == free[0][: free[0].index(stop) + 1]
    assert responses(rollout(model, greedy=True, eos=[free[0][0]], stop_token_ids=[stop])) == own
    assert responses(rollout(model, greedy=True, eos=[stop], stop_token_ids=[])) == free


def test_seed_a5_fixed_length_ignores_stop_tokens():
    model = tiny_model()
    out = rollout(model, fixed_length=True, n=4, eos=range(2, 40), max_new_tokens=9, min_new_tokens=9)
    assert [len(r) for r in responses(out)] == [9] * 16
    assert not out["truncated"].any()
    assert any(set(r[:-1]) & set(range(2, 40)) for r in responses(out))
    assert same(out, rollout(model, fixed_length=True, n=4, eos=(), max_new_tokens=9))


def test_min_new_tokens_is_part_of_the_reported_distribution():
    ours, plain = pair("llama")
    stops = torch.arange(2, 60)
    out = rollout(ours, eos=stops.tolist(), min_new_tokens=24)
    for ids, logprobs, mask in zip(*(out.sequences(k) for k in ("input_ids", "logprobs", "loss_mask")), strict=True):
        with torch.no_grad():
            logits = plain(input_ids=ids[None]).logits[0].index_fill(-1, stops, -torch.inf)
        want = logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        assert torch.allclose(logprobs[1:][mask[1:]], want[mask[1:]], atol=1e-5)


class Syllables:
    """Tokenizer with tokens of one to three letters from {a, b}, so that strings span tokens in many ways."""

    words = ("a", "b", "ab", "ba", "aab", "bba", "")

    def decode(self, ids, **_):
        return "".join(self.words[i % len(self.words)] for i in ids)


@pytest.mark.parametrize("stop_strings", [["abba"], ["bbb", "abaabab"], ["aa"]])
@pytest.mark.parametrize("slots", [None, 3])
def test_trap_a12_stop_strings_across_tokens_keep_the_tokens_as_sampled(stop_strings, slots):
    tokenizer = Syllables()
    common = {"greedy": True, "n": 1, "max_new_tokens": 40, "eos": (), "max_slots": slots}
    model, data = tiny_model(), prompts((3, 9, 1, 5, 2, 8), seed=3)
    free = responses(rollout(model, data, **common))
    out = rollout(model, data, **common, stop_strings=stop_strings, tokenizer=tokenizer)
    for row, (whole, got) in enumerate(zip(free, responses(out), strict=True)):
        ends = [i for i in range(1, 41) if any(s in tokenizer.decode(whole[:i]) for s in stop_strings)]
        assert got == whole[: ends[0] if ends else 40]
        assert bool(out["truncated"][row]) == (not ends)
    assert not out["truncated"].all()


def test_trap_b5_the_models_generation_config_has_no_effect(tmp_path):
    model = tiny_model()
    neutral = rollout(model, n=3)
    model.generation_config = TransformersGenerationConfig(
        repetition_penalty=1.5, top_k=2, temperature=0.3, top_p=0.5, do_sample=True, max_new_tokens=3, eos_token_id=9
    )
    model.save_pretrained(tmp_path)
    assert (tmp_path / "generation_config.json").is_file()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=ATTENTION).eval()
    assert loaded.generation_config.repetition_penalty == 1.5
    assert same(rollout(loaded, n=3), neutral)


def test_trap_b6_dropout_is_off_and_modes_come_back():
    quiet = tiny_model("gpt2")
    noisy = tiny_model("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5).train()
    noisy.transformer.h[1].eval()
    noisy.load_state_dict(quiet.state_dict())
    before = [m.training for m in noisy.modules()]
    assert same(rollout(noisy), rollout(quiet))
    assert [m.training for m in noisy.modules()] == before


def test_results_can_be_used_in_training():
    out = rollout(tiny_model())
    weight = torch.ones(1, requires_grad=True)
    (weight * out["logprobs"]).sum().backward()
    assert weight.grad == out["logprobs"].sum()


def test_bad_prompts_are_named():
    model = tiny_model()
    empty, unknown = [torch.tensor([5]), torch.tensor([], dtype=torch.int64)], [torch.tensor([5, VOCAB])]
    with pytest.raises(DataError, match="'p1': the prompt is empty"):
        rollout(model, empty)
    with pytest.raises(DataError, match=rf"'p0': the prompt has token ids from 5 to {VOCAB}"):
        rollout(model, unknown)
    two = SequenceSample.from_sequences(["x"], {"prompt_ids": [[[3, 4], [5]]]})
    common = {"seed": 0, "eos_token_ids": [], "tokenizer": None}
    whole = RolloutModel(model, LMHead(model.lm_head.weight))
    with pytest.raises(ValueError, match="'x' has 2 sequences of 'prompt_ids'"):
        generate(whole, two, GenerationConfig(), InProcessSampling(), **common)
    with pytest.raises(ValueError, match="no packed key 'prompt_ids'"):
        generate(whole, two.rename({"prompt_ids": "x"}), GenerationConfig(), InProcessSampling(), **common)


def test_too_many_positions_are_refused_with_both_numbers():
    model = tiny_model("gpt2")
    assert len(responses(rollout(model, prompts((8,)), max_new_tokens=120, eos=()))[0]) == 120
    with pytest.raises(DataError, match=r"'p0': a prompt of 9 tokens plus max_new_tokens=120 .* \(128\)\. .* 119"):
        rollout(model, prompts((9,)), max_new_tokens=120)


def test_bad_stop_settings_are_refused():
    model = tiny_model()
    with pytest.raises(ConfigError, match=f"stop token {VOCAB} is not in the vocabulary"):
        rollout(model, stop_token_ids=[VOCAB])
    with pytest.raises(ConfigError, match="no tokenizer"):
        rollout(model, stop_strings=["x"])
    with pytest.raises(ConfigError, match="fixed_length"):
        rollout(model, stop_strings=["x"], fixed_length=True, tokenizer=tiny_tokenizer())


def test_other_attention_is_refused():
    with pytest.raises(ValueError, match="attn_implementation='realign'"):
        rollout(tiny_model(attention="eager"))


def test_broken_weights_are_an_error():
    model = tiny_model()
    torch.nn.init.constant_(model.model.norm.weight, float("nan"))
    with pytest.raises(RunError, match="not finite"):
        rollout(model)


def test_a_frozen_model_samples_the_same_in_low_precision_and_stays_frozen():
    def sample(engine):
        return engine.generate(sample_of(prompts()), GenerationConfig(max_new_tokens=6), seed=0)

    trained, frozen = (tiny_engine(dtype=torch.bfloat16, fused_rollout=False) for _ in range(2))
    frozen.module.requires_grad_(False)
    got, want = sample(frozen), sample(trained)
    assert torch.equal(got["input_ids"], want["input_ids"])
    assert torch.equal(got["logprobs"], want["logprobs"])
    assert not any(p.requires_grad for p in frozen.module.parameters())
