from __future__ import annotations

import pytest
import torch

from realign.engines.attention import PackedContext, packed_inputs
from realign.functional.packed import cu_seqlens_of
from tests.tiny import FAMILIES, VOCAB, tiny_model

LENGTHS = (7, 1, 12, 0, 4)


def packed_ids(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> torch.Tensor:
    return torch.randint(3, VOCAB, (sum(lengths),), generator=torch.Generator().manual_seed(seed))


def packed_logits(model, ids_T, lengths=LENGTHS, backend="auto"):
    cu = cu_seqlens_of(lengths)
    context = PackedContext(cu, backend)
    return model(**packed_inputs(ids_T, cu), realign_context=context).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_trap_a2_packed_equals_alone(family):
    alone, packed = tiny_model(family, attention="eager"), tiny_model(family)
    packed.load_state_dict(alone.state_dict())
    ids_T = packed_ids()
    want = torch.cat([alone(input_ids=x[None], use_cache=False).logits[0] for x in ids_T.split(LENGTHS) if len(x)])
    got = packed_logits(packed, ids_T)
    assert torch.allclose(got, want, atol=1e-5, rtol=1e-5)

    probe_V = torch.linspace(-1, 1, VOCAB)
    (want.softmax(-1) * probe_V).sum().backward()
    (got.softmax(-1) * probe_V).sum().backward()
    scale = max(p.grad.abs().max() for p in alone.parameters() if p.grad is not None)
    for (name, a), b in zip(alone.named_parameters(), packed.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            assert torch.allclose(a.grad, b.grad, atol=float(1e-5 * scale), rtol=1e-4), name
