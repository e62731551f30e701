from __future__ import annotations

import dataclasses

import pytest
import torch

from realign.engines.training.optimizer import OptimizerSpec
from realign.functional.logprobs import LMHead
from realign.functional.packed import cu_seqlens_of
from realign.models.network.output import PackedOutput, ScalarHead
from tests.tiny import VOCAB, random_sample, tiny_engine

HIDDEN = 6


def output(lengths, head=None, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    hidden_TH = torch.randn(sum(lengths), HIDDEN, generator=generator).to(dtype).requires_grad_()
    head = head or LMHead(torch.randn(11, HIDDEN, generator=generator))
    ids_T = torch.randint(0, 11, (sum(lengths),), generator=generator)
    return PackedOutput(hidden_TH, head, ids_T, cu_seqlens_of(lengths))


def scalar_output(lengths, **kwargs):
    return output(lengths, ScalarHead(torch.arange(1.0, HIDDEN + 1)[None], torch.tensor([0.5])), **kwargs)


def test_trap_a4_index_table():
    out = output([3, 2])
    logp_TV = out.logits.log_softmax(-1)
    # Token 1 is predicted after token 0, token 2 after token 1, and token 4 after token 3. Token 3 starts a sequence.
    want = [0.0, logp_TV[0, out.input_ids_T[1]], logp_TV[1, out.input_ids_T[2]], 0.0, logp_TV[3, out.input_ids_T[4]]]
    want = torch.stack([torch.as_tensor(x) for x in want])
    torch.testing.assert_close(out.logprobs(), want)
    logprobs_T, entropy_T = out.logprobs_and_entropy()
    torch.testing.assert_close(logprobs_T, want)
    entropy = -(logp_TV.exp() * logp_TV).sum(-1)
    torch.testing.assert_close(
        entropy_T, torch.stack([0 * entropy[0], entropy[0], entropy[1], 0 * entropy[0], entropy[3]])
    )

    values = scalar_output([3, 2])
    after_T = values.hidden_TH @ values.head.weight_1H[0] + 0.5
    zero = torch.zeros(())
    torch.testing.assert_close(values.values(), torch.stack([zero, after_T[0], after_T[1], zero, after_T[3]]))
    torch.testing.assert_close(values.scores(), torch.stack([after_T[2], after_T[4]]))


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_divergence_compares_the_distributions_of_the_same_token(beta):
    """The other model has another hidden size; its states and the result are at the index of the predicted token."""
    own, other = output([4, 3]), output([4, 3], LMHead(torch.randn(11, HIDDEN)), seed=1)
    own = dataclasses.replace(own, heads={"teacher": other.head})
    where_T = torch.tensor([1, 0, 1, 1, 0, 1, 0]).bool()
    states_TH = other.hidden_states(where_T=where_T).detach()
    divergence_T = own.divergence("teacher", states_TH, beta=beta, temperature=0.7, where_T=where_T)
    logq_TV, logp_TV = ((x.logits / 0.7).log_softmax(-1).roll(1, 0) for x in (own, other))
    q_TV, p_TV = logq_TV.exp(), logp_TV.exp()
    logm_TV = (beta * p_TV + (1 - beta) * q_TV).log()
    terms = {0.0: p_TV * (logp_TV - logq_TV), 1.0: q_TV * (logq_TV - logp_TV)}
    mixed = beta * p_TV * (logp_TV - logm_TV) + (1 - beta) * q_TV * (logq_TV - logm_TV)
    want_T = torch.where(where_T, terms.get(beta, mixed).sum(-1), 0)
    want_T[0] = 0  # selected, but the first token of a sequence is not predicted
    torch.testing.assert_close(divergence_T, want_T)
    divergence_T.sum().backward()
    used = own.hidden_TH.grad.abs().sum(-1) > 0
    assert used.tolist() == [False, True, True, False, True, False, False]
    with pytest.raises(ValueError, match=r"no head of role 'ref': the engine has those of \['teacher'\]"):
        own.divergence("ref", states_TH)


@pytest.mark.parametrize("lengths", [[1], [0], [0, 1, 0, 3, 0], [2, 0], [1, 1]])
def test_trap_a14_sequences_of_length_0_and_1(lengths):
    out = output(lengths)
    assert out.logprobs().shape == (sum(lengths),)
    assert out.logprobs().isfinite().all()
    assert all(out.logprobs()[start] == 0 for start, n in zip(out.cu_seqlens[:-1], lengths, strict=True) if n)
    values = scalar_output(lengths)
    assert values.values().shape == (sum(lengths),)
    assert [bool(x == 0) for x in values.scores()] == [n == 0 for n in lengths]
    (values.values().sum() + values.scores().sum() + out.logprobs().sum()).backward()


@pytest.mark.parametrize("text", [[3, 4, 2], [3, 2, 4], [2, 2, 2], [3, 4, 5]])
def test_trap_a9_scores_stand_at_the_last_token_whatever_it_is(text):
    """Test a pad token that equals the end token, and texts with the end token in the prompt, several times, or
    never."""
    engine = tiny_engine("llama", model={"head": "score", "pad_token_id": 2, "eos_token_id": 2})
    sample = random_sample([[5, 3]])
    ids_T = sample["input_ids"].clone()
    ids_T[5:] = torch.tensor(text)
    sample = sample.with_tokens(input_ids=ids_T)
    with torch.no_grad():
        got = engine.network.run(sample, sample).scores()
        hidden = engine.module.base_model.to(torch.float32)
        engine.module.set_attn_implementation("eager")
        last = hidden(input_ids=ids_T[None, 5:], use_cache=False).last_hidden_state[0, -1]
    torch.testing.assert_close(got[1], last @ engine.module.score.weight[0], atol=1e-5, rtol=1e-5)


def test_trap_a1_first_tokens_do_not_touch_other_sequences():
    engine = tiny_engine()
    sample = random_sample([[5], [4]])
    changed = sample["input_ids"].clone()
    changed[5] = (changed[5] + 1) % VOCAB
    with torch.no_grad():
        before = engine.network.run(sample, sample).logprobs()
        other = sample.with_tokens(input_ids=changed)
        after = engine.network.run(other, other).logprobs()
    assert torch.equal(before[:5], after[:5])
    assert before[5] == after[5] == 0
    assert not torch.equal(before[6:], after[6:])


def test_trap_b8_no_logits_are_kept_for_the_backward_pass():
    engine = tiny_engine(optimizer=OptimizerSpec(lr=1e-3))
    sample = random_sample([[40, 30], [50]])
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(tuple(x.shape)) or x, lambda x: x):
        out = engine.network.run(sample, sample)
        sum(out.logprobs_and_entropy()).sum().backward()
    tokens = (120, 117)  # all tokens, and all except the first of each sequence
    assert any(shape[0] in tokens for shape in kept if shape)
    assert not [shape for shape in kept if shape and shape[-1] == VOCAB and shape[0] in tokens]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trap_b9_everything_a_loss_sees_is_fp32(dtype):
    head = LMHead(torch.randn(11, HIDDEN, dtype=dtype))
    out = output([4, 3], head, dtype=dtype)
    assert out.logprobs().dtype == out.logits.dtype == torch.float32
    assert {x.dtype for x in out.logprobs_and_entropy()} == {torch.float32}
    scalar = output([4, 3], ScalarHead(torch.randn(1, HIDDEN, dtype=dtype)), dtype=dtype)
    assert scalar.values().dtype == scalar.scores().dtype == torch.float32


def test_wrong_questions_are_refused():
    with pytest.raises(ValueError, match="values requires a scalar head"):
        output([3]).values()
    with pytest.raises(ValueError, match="scores requires a scalar head"):
        output([3]).scores()
    with pytest.raises(ValueError, match="logprobs requires a language model"):
        scalar_output([3]).logprobs()
    with pytest.raises(ValueError, match="logits requires a language model"):
        _ = scalar_output([3]).logits
    with pytest.raises(
        ValueError, match=r"where_T has dtype torch.float32 and shape \[3\]. It must be bool of shape \[3\]."
    ):
        output([3]).logprobs(where_T=torch.ones(3))
    with pytest.raises(ValueError, match=r"where_T has dtype torch.bool and shape \[2\]"):
        output([3]).logprobs(where_T=torch.ones(2).bool())
