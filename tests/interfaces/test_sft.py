from __future__ import annotations

import pytest
import torch

from realign.api import MicroBatchSpec, Model, SequenceSample, stat_values
from realign.interfaces.sft import SFTInterface
from realign.testing import BigramEngine


def batch() -> SequenceSample:
    data = SequenceSample.from_sequences(["a", "b"], {"input_ids": [[[1, 2, 3]], [[4, 5]]]})
    return data.with_tokens(loss_mask=torch.tensor([False, True, True, False, True]))


def test_loss_and_gradient_equal_cross_entropy_of_the_masked_tokens():
    engine, lr = BigramEngine(), 0.5
    table = engine.logits_VV.clone().requires_grad_()
    pairs = [(1, 2), (2, 3), (4, 5)]  # (token before, token)
    loss = torch.nn.functional.cross_entropy(table[[a for a, _ in pairs]], torch.tensor([b for _, b in pairs]))
    loss.backward()
    before = engine.logits_VV.clone()
    stats = stat_values(SFTInterface().train_step(Model("actor", engine), batch(), MicroBatchSpec()))
    assert stats["loss"] == pytest.approx(loss.item(), abs=1e-12)
    assert stats["nll"] == pytest.approx(loss.item(), rel=1e-6)
    torch.testing.assert_close(engine.logits_VV, before - lr * table.grad, rtol=0, atol=1e-12)


def test_minibatches_are_dealt_anew_in_each_step_and_alike_in_each_run():
    ids = [f"p{i}" for i in range(8)]
    data = SequenceSample.from_sequences(ids, {"input_ids": [[[1, 2]]] * 8})
    data = data.with_tokens(loss_mask=torch.tensor([False, True] * 8))

    def order(version: int) -> list[str]:
        seen: list[str] = []

        class Watching(BigramEngine):
            def train_batch(self, data, mb_spec, loss_fn, loss_weight_fn):
                seen.extend(data.ids)
                return super().train_batch(data, mb_spec, loss_fn, loss_weight_fn)

        model = Model("actor", Watching(), version=version)
        SFTInterface(n_minibatches=3).train_step(model, data, MicroBatchSpec())
        assert sorted(seen) == ids
        return seen

    assert order(0) == order(0) != order(1)
