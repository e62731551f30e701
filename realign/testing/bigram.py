"""`BigramEngine`: an exact engine for tests, a bigram table in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from realign.api import (
    Completion,
    GenerationConfig,
    Mean,
    MicroBatchSpec,
    Request,
    SequenceSample,
    Stats,
    Sum,
    merge_stats,
)
from realign.api.engine import EngineCapabilities, LossFn, LossWeightFn, PipelinableEngine, PostHook, QValues, StepIf
from realign.api.sampler import requests_of, sample_of
from realign.api.stats import keep_traces
from realign.functional import LMHead, last_true, previous


@dataclass
class BigramOutput:
    """`ModelOutput` of a bigram table of logits: the next token depends only on the current one."""

    logits_VV: Tensor
    values_V: Tensor
    ids_T: Tensor
    cu_seqlens: Tensor
    heads: Mapping[str, LMHead] = field(default_factory=dict)

    @property
    def lm_head(self) -> LMHead:
        """The table of logits, whose hidden states are one-hot vectors of the current token."""
        return LMHead(self.logits_VV.T)

    def hidden_states(self, *, where_T: Tensor | None = None) -> Tensor:
        """Return the one-hot vector of the token before each token: [T, V]."""
        before_T, known_T = self._before(where_T)
        one_hot_TV = torch.nn.functional.one_hot(before_T.clamp(min=0), len(self.logits_VV)).to(self.logits_VV.dtype)
        return torch.where(known_T[:, None], one_hot_TV, 0)

    def divergence(
        self,
        role: str,
        hidden_TH: Tensor,
        *,
        beta: float = 1.0,
        temperature: float = 1.0,
        where_T: Tensor | None = None,
    ) -> Tensor:
        """Return the divergence from another role's distribution: [T], by its definition on all logits."""
        before_T, known_T = self._before(where_T)
        other_TV = torch.where(known_T[:, None], hidden_TH, 0) @ self.heads[role].weight_VH.T
        logq_TV = (self.logits_VV[before_T.clamp(min=0)] / temperature).log_softmax(-1)
        logp_TV = (other_TV / temperature).log_softmax(-1)
        q_TV, p_TV = logq_TV.exp(), logp_TV.exp()
        forward_T, reverse_T = (p_TV * (logp_TV - logq_TV)).sum(-1), (q_TV * (logq_TV - logp_TV)).sum(-1)
        if beta in (0, 1):
            return torch.where(known_T, reverse_T if beta else forward_T, 0)
        logm_TV = (beta * p_TV + (1 - beta) * q_TV).log()
        target_T, own_T = (p_TV * (logp_TV - logm_TV)).sum(-1), (q_TV * (logq_TV - logm_TV)).sum(-1)
        return torch.where(known_T, beta * target_T + (1 - beta) * own_T, 0)

    @property
    def logits(self) -> Tensor:
        """[T, V] logits after each token."""
        return self.logits_VV[self.ids_T]

    def logprobs(self, *, temperature: float = 1.0, where_T: Tensor | None = None) -> Tensor:
        """Return the log-probs of the tokens: [T]."""
        return self.logprobs_and_entropy(temperature=temperature, where_T=where_T)[0]

    def logprobs_and_entropy(self, *, temperature: float = 1.0, where_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies of the tokens: ([T], [T]); 0 outside `where_T` and at first tokens."""
        before_T, known_T = self._before(where_T)
        logp_TV = (self.logits_VV[before_T.clamp(min=0)] / temperature).log_softmax(-1)
        logp_T = logp_TV.gather(-1, self.ids_T[:, None])[:, 0]
        entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)
        return torch.where(known_T, logp_T, 0), torch.where(known_T, entropy_T, 0)

    def _before(self, where_T: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return [T] the token before each token, and [T] bool whether it exists and is in `where_T`."""
        before_T = previous(self.ids_T, self.cu_seqlens, fill=-1)
        return before_T, (before_T >= 0) if where_T is None else (before_T >= 0) & where_T

    def values(self) -> Tensor:
        """Return the value of the state before each token: [T]."""
        return previous(self.values_V[self.ids_T], self.cu_seqlens, fill=0.0)

    def scores(self) -> Tensor:
        """Return the value at the last token of each sequence: [S]."""
        last_S = last_true(torch.ones_like(self.ids_T, dtype=torch.bool), self.cu_seqlens)
        return torch.where(last_S >= 0, self.values_V[self.ids_T[last_S.clamp(min=0)]], 0)

    def q_values(self, *, where_T: Tensor | None = None) -> QValues:
        """Return the action values of the tokens, of two Q heads that are functions of the two tables.

        Q_1 is the logits, and Q_2 the logits plus the next token's value. The targets are 0.9 times these.
        """
        before_T, known_T = self._before(where_T)
        q_KTV = torch.stack([self.logits_VV, self.logits_VV + self.values_V])[:, before_T.clamp(min=0)]
        chosen_KT1 = self.ids_T[None, :, None].expand(2, -1, 1)
        online_KT, logprobs_KT = (x.gather(-1, chosen_KT1)[..., 0] for x in (q_KTV, q_KTV.log_softmax(-1)))
        q = QValues(online_KT, 0.9 * online_KT.detach().amin(0), logprobs_KT)
        return QValues(*(torch.where(known_T, x, 0) for x in q))


class BigramEngine(PipelinableEngine):
    """`PipelinableEngine` for a bigram table in float64, trained with SGD; small enough to verify by hand.

    Further arguments are fields of `EngineCapabilities`, such as `positions`.
    """

    def __init__(
        self, *, vocabulary: int = 11, seed: int = 0, lr: float = 0.5, trainable: bool = True, **known: Any
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits_VV = torch.randn(vocabulary, vocabulary, generator=generator, dtype=torch.float64)
        self.values_V = torch.randn(vocabulary, generator=generator, dtype=torch.float64)
        self.lr = lr
        self.trainable = trainable
        self._known = known
        self.heads: dict[str, LMHead] = {}
        """Heads of other roles, for losses over the whole vocabulary."""

    @override
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            frozenset({"logprobs", "values", "scores", "q_values"}), self.trainable, **self._known
        )

    @property
    def parameters(self) -> list[Tensor]:
        """The table of logits and the table of values."""
        return [self.logits_VV, self.values_V]

    def output(self, mb: SequenceSample) -> BigramOutput:
        """Run the forward pass of a batch."""
        return BigramOutput(self.logits_VV, self.values_V, mb["input_ids"], mb.cu_seqlens(), self.heads)

    @override
    def use_heads(self, heads: Mapping[str, LMHead]) -> None:
        self.heads = dict(heads)

    @override
    def forward(self, data: SequenceSample, mb_spec: MicroBatchSpec, post_hook: PostHook) -> SequenceSample:
        parts = data.split(mb_spec)
        with torch.no_grad():
            results = [post_hook(self.output(mb), mb) for mb in parts]
        return parts.restore([r.select(r.keys - data.keys) for r in results])

    @override
    def weights(self) -> dict[str, Tensor]:
        return {"logits": self.logits_VV, "values": self.values_V}

    @override
    def load_weights(self, weights: Mapping[str, Tensor], mix: float = 1.0) -> None:
        own = self.weights()
        if {name: x.shape for name, x in weights.items()} != {name: x.shape for name, x in own.items()}:
            raise ValueError(f"the weights must be {', '.join(own)} of the same shapes")
        if not 0 < mix <= 1:
            raise ValueError(f"mix={mix}: must be above 0 and at most 1")
        for name, x in own.items():
            # With mix=1, lerp returns the end bitwise.
            x.lerp_(weights[name], mix)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.weights()  # SGD has no other state

    @override
    def load_state_dict(self, state: Mapping[str, Any], *, weights_only: bool = False) -> None:
        self.load_weights(state)

    @override
    def train_batch(
        self,
        data: SequenceSample,
        mb_spec: MicroBatchSpec,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        step_if: StepIf | None = None,
    ) -> Stats:
        """Take one step of SGD."""
        if not self.trainable:
            raise ValueError("this engine does not train")
        weight = loss_weight_fn(data)
        total, collected = torch.zeros((), dtype=torch.float64), list[Stats]()
        for p in self.parameters:
            p.requires_grad_(True).grad = None
        for mb in data.split(mb_spec):
            loss, stats = loss_fn(self.output(mb), mb)
            if weight > 0 and loss.requires_grad:
                (loss / weight).backward()
            total = total + loss.detach()
            collected.append(merge_stats([keep_traces(stats, mb, mb_spec)]))
        merged = merge_stats(collected)
        gradients = [p.requires_grad_(False).grad for p in self.parameters]
        norm = torch.stack([torch.zeros_like(total) if g is None else g.norm() for g in gradients]).norm()
        stepping = bool(weight > 0) and bool((total + norm).isfinite()) and (step_if is None or step_if(merged))
        for p in self.parameters:
            if p.grad is not None and stepping:
                p -= self.lr * p.grad
        own: Stats = {"loss": Mean(total, weight), "optimizer_steps": Sum(torch.tensor(float(stepping)))}
        return merge_stats([merged, own])

    @override
    def generate(self, data: SequenceSample, config: GenerationConfig, *, seed: int) -> SequenceSample:
        """Sample up to `max_new_tokens` tokens for each response. Token 0 ends a response unless `fixed_length`.

        Raises:
            ValueError: the config asks for choices of experts or sampling masks, which the table does not have.
        """
        if config.router_replay:
            raise ValueError("generation.router_replay=true: a bigram table has no experts")
        if config.sampling_replay:
            raise ValueError("generation.sampling_replay=true: a bigram table samples from all of its tokens")
        logp_VV = (self.logits_VV / config.temperature).log_softmax(-1)
        probs_VV, best = logp_VV.exp(), logp_VV.argmax(-1).tolist()
        completions = [self._respond(request, logp_VV, probs_VV, best) for request in requests_of(data, config, seed)]
        out = sample_of(data, completions, config.n)
        return out.select(out.keys - {"versions"})

    def _respond(self, request: Request, logp_VV: Tensor, probs_VV: Tensor, best: list[int]) -> Completion:
        config, generator = request.config, torch.Generator().manual_seed(request.response_seed)
        tokens, ended = [int(request.prompt_ids[-1])], False
        while len(tokens) <= config.max_new_tokens and not ended:
            last = tokens[-1]
            token = best[last] if config.greedy else int(torch.multinomial(probs_VV[last], 1, generator=generator))
            tokens.append(token)
            ended = token == 0 and not config.fixed_length
        ids, truncated = torch.tensor(tokens), not ended and not config.fixed_length
        logps = logp_VV[ids[:-1], ids[1:]].float()
        return Completion(ids[1:], logps, torch.zeros_like(ids[1:], dtype=torch.int32), truncated)

    @override
    def save(self, path: Path) -> None:
        """Write the two tables."""
        path.mkdir(parents=True, exist_ok=True)
        np.savez(path / "bigram.npz", logits=self.logits_VV.numpy(), values=self.values_V.numpy())
