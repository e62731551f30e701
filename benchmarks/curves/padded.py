"""Padded PPO: an independent implementation of the training loop of openai/lm-human-preferences.

Written from its descriptions: Ziegler et al. 2019 (arXiv:1909.08593), and "The N Implementation Details of RLHF with
PPO" (Hugging Face, 2023). It is a reference for tests and curves. It uses torch, a language model of transformers as
network, and no code of realign:

- Batches are padded to fixed query and response lengths. Padding is left of the query, or between query and response.
- Position ids are an exclusive cumulative sum of the mask. The state before a token is the hidden state of the last
  present token before it.
- The sampling temperature divides the logits in all log-probs. Responses have a fixed length.
- The reward of a token is -coefficient * (log-prob - reference log-prob), plus the score at the last token. It is
  whitened without shifting the mean. Advantages of GAE are whitened, all by population variance.
- Policy and values share a trunk, one loss and one optimizer. Ratios and values are clipped. Initial values are 0.
- Adam with epsilon before (TensorFlow) or after (PyTorch) the bias correction. The learning rate decays per batch.
- A proportional controller moves the KL coefficient. Letters: B batch, Q query columns, R response columns, V
  vocabulary, H hidden units.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Constants:
    """Constants of the `sentiment` experiment; the run length and what depends on it have no default."""

    updates: int
    """Rollout batches, over which the learning rate decays to 0."""
    lr: float = 1e-5
    horizon: int = 10_000
    """Horizon of the KL controller in episodes."""
    response_tokens: int = 24
    temperature: float = 0.7
    kl_coef: float = 0.15
    kl_target: float = 6.0
    gamma: float = 1.0
    lam: float = 0.95
    clip: float = 0.2
    value_clip: float = 0.2
    value_coef: float = 0.1
    epochs: int = 4
    minibatches: int = 1
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-5
    tensorflow_adam: bool = True
    """Add epsilon before the bias correction, as TensorFlow does; otherwise after it, as PyTorch does."""
    scaled_logprobs: bool = True
    """Divide the logits by the temperature in log-probs, as in sampling; the original does."""
    pad_left: bool = True
    """Put padding left of the query; otherwise between query and response."""


class Rollout(NamedTuple):
    """A batch of queries and responses, with the statistics of the policy that sampled it."""

    ids: Tensor
    """[B, Q+R] tokens."""
    mask: Tensor
    """[B, Q+R] bool: False for padding."""
    logprobs: Tensor
    """[B, R]."""
    ref_logprobs: Tensor
    """[B, R]."""
    values: Tensor
    """[B, R]."""
    scores: Tensor
    """[B], at the last token; or [B, R], at each token."""
    sampler_kl: Tensor
    """[B] KL to the reference along the response, of the distributions that are sampled: with temperature."""

    def rows(self, index: Tensor) -> Rollout:
        """Return some rows."""
        return Rollout(*(x[index] for x in self))


class Adam:
    """Adam without weight decay and without clipping."""

    def __init__(self, parameters: Sequence[Tensor], constants: Constants) -> None:
        self.parameters, self.constants, self.step_number = list(parameters), constants, 0
        self.first = [torch.zeros_like(p) for p in parameters]
        self.second = [torch.zeros_like(p) for p in parameters]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], lr: float) -> None:
        """Update the parameters in place."""
        self.step_number += 1
        (beta1, beta2), eps = self.constants.betas, self.constants.eps
        correction1, correction2 = 1 - beta1**self.step_number, 1 - beta2**self.step_number
        for p, g, m, v in zip(self.parameters, gradients, self.first, self.second, strict=True):
            m.mul_(beta1).add_(g, alpha=1 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            if self.constants.tensorflow_adam:
                p -= lr * math.sqrt(correction2) / correction1 * m / (v.sqrt() + eps)
            else:
                p -= lr * (m / correction1) / ((v / correction2).sqrt() + eps)


def whitened(x: Tensor, *, shift_mean: bool = True) -> Tensor:
    """Return `x` with variance 1, and with mean 0 if `shift_mean`."""
    mean, variance = x.mean(), x.var(correction=0)
    y = (x - mean) * torch.rsqrt(variance + 1e-8)
    return y if shift_mean else y + mean


def advantages_and_returns(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Compute GAE [B, R] and its returns [B, R]; the value after the last token is 0."""
    advantages, later = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    columns = rewards.shape[1]
    for t in reversed(range(columns)):
        following = values[:, t + 1] if t + 1 < columns else torch.zeros_like(later)
        later = rewards[:, t] + gamma * following - values[:, t] + gamma * lam * later
        advantages[:, t] = later
    return advantages, advantages + values


class PaddedPPO:
    """Policy, reference, value head, optimizer and KL coefficient."""

    def __init__(self, folder: Path, constants: Constants, *, seed: int = 0, device: str = "cpu") -> None:
        """Load the initial policy from a model folder; `seed` is for sampling and permutations."""
        from transformers import AutoModelForCausalLM

        self.constants, self.kl_coef, self.updates_done = constants, constants.kl_coef, 0
        policy: Any = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
        self.policy = policy.float().eval().to(device)  # eval: without dropout
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)
        self.value_weight = torch.zeros(self.policy.config.hidden_size, device=device, requires_grad=True)
        self.value_bias = torch.zeros((), device=device, requires_grad=True)
        self.parameters = [*self.policy.parameters(), self.value_weight, self.value_bias]
        self.adam = Adam(self.parameters, constants)
        self.device = torch.device(device)
        self.random = torch.Generator().manual_seed(seed)  # of the host, on every device

    def pad(self, queries: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Return padded queries [B, Q] and their mask [B, Q]."""
        width = max(map(len, queries))
        ids, mask = torch.zeros(len(queries), width, dtype=torch.long), torch.zeros(len(queries), width).bool()
        for row, query in enumerate(queries):
            columns = slice(width - len(query), width) if self.constants.pad_left else slice(len(query))
            ids[row, columns], mask[row, columns] = torch.tensor(query), True
        return ids.to(self.device), mask.to(self.device)

    @torch.no_grad()
    def sample(self, queries: Sequence[Sequence[int]]) -> Tensor:
        """Sample responses [B, R] at the temperature, without stopping at any token."""
        ids, mask = self.pad(queries)
        positions = mask.long().cumsum(1) - mask.long()
        out = self.policy.base_model(ids, attention_mask=mask.long(), position_ids=positions, use_cache=True)
        hidden = _at(out.last_hidden_state, _last_present(mask)[:, -1:])[:, 0]
        next_position, drawn = mask.sum(1, keepdim=True), []
        for _ in range(self.constants.response_tokens):
            probabilities = (self.policy.lm_head(hidden) / self.constants.temperature).softmax(-1)
            token = torch.multinomial(probabilities.cpu(), 1, generator=self.random).to(self.device)
            drawn.append(token)
            mask = torch.cat([mask, torch.ones_like(token).bool()], 1)
            cache = out.past_key_values
            out = self.policy.base_model(
                token, attention_mask=mask.long(), position_ids=next_position, past_key_values=cache, use_cache=True
            )
            hidden, next_position = out.last_hidden_state[:, -1], next_position + 1
        return torch.cat(drawn, 1)

    def evaluate(self, network: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [B, R, V] of the responses' tokens and hidden states [B, R, H] before them."""
        response = self.constants.response_tokens
        positions = mask.long().cumsum(1) - mask.long()
        states = network.base_model(ids, attention_mask=mask.long(), position_ids=positions).last_hidden_state
        hidden = _at(states, _last_present(mask)[:, -response - 1 : -1])
        return network.lm_head(hidden), hidden

    def logprobs(self, logits: Tensor, *, scaled: bool) -> Tensor:
        """Return log-probs of logits, with the temperature if `scaled`."""
        return (logits / self.constants.temperature if scaled else logits).log_softmax(-1)

    def values(self, hidden: Tensor) -> Tensor:
        """Return values [B, R] of hidden states [B, R, H]."""
        return hidden @ self.value_weight + self.value_bias

    @torch.no_grad()
    def rollout(self, queries: Sequence[Sequence[int]], responses: Tensor, scores: Tensor) -> Rollout:
        """Evaluate queries and responses with the current policy and the reference."""
        ids, mask = self.pad(queries)
        ids, mask = torch.cat([ids, responses], 1), torch.cat([mask, torch.ones_like(responses).bool()], 1)
        logits, hidden = self.evaluate(self.policy, ids, mask)
        reference, _ = self.evaluate(self.reference, ids, mask)
        chosen, ref_chosen, sampled, ref_sampled = (
            _chosen(self.logprobs(x, scaled=scaled), responses)
            for scaled in (self.constants.scaled_logprobs, True)
            for x in (logits, reference)
        )
        return Rollout(ids, mask, chosen, ref_chosen, self.values(hidden), scores, (sampled - ref_sampled).sum(1))

    def loss(self, batch: Rollout) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a mini-batch, and tensors for the metrics."""
        c = self.constants
        rewards = -self.kl_coef * (batch.logprobs - batch.ref_logprobs)
        if batch.scores.ndim == 1:
            rewards[:, -1] += batch.scores
        else:
            rewards = rewards + batch.scores
        rewards = whitened(rewards, shift_mean=False)
        advantages, returns = advantages_and_returns(rewards, batch.values, c.gamma, c.lam)
        advantages = whitened(advantages)
        responses = batch.ids[:, -c.response_tokens :]
        logits, hidden = self.evaluate(self.policy, batch.ids, batch.mask)
        logprobs, values = self.logprobs(logits, scaled=c.scaled_logprobs), self.values(hidden)
        clipped_values = batch.values + (values - batch.values).clamp(-c.value_clip, c.value_clip)
        value_loss = 0.5 * torch.maximum((values - returns) ** 2, (clipped_values - returns) ** 2).mean()
        difference = _chosen(logprobs, responses) - batch.logprobs
        ratio = difference.exp()
        plain, limited = -advantages * ratio, -advantages * ratio.clamp(1 - c.clip, 1 + c.clip)
        policy_loss = torch.maximum(plain, limited).mean()
        parts = {"difference": difference, "clipped": limited > plain, "policy_loss": policy_loss}
        parts |= {"value_loss": value_loss, "returns": returns, "entropy": -(logprobs.exp() * logprobs).sum(-1)}
        return policy_loss + c.value_coef * value_loss, {name: x.detach() for name, x in parts.items()}

    def update(self, batch: Rollout) -> dict[str, float]:
        """Train on a rollout batch, adapt the KL coefficient, and return the metrics of the update."""
        c, size = self.constants, len(batch.scores)
        lr = c.lr * (1 - self.updates_done / c.updates)
        parts: list[dict[str, Tensor]] = []
        for _ in range(c.epochs):
            for index in torch.randperm(size, generator=self.random).to(self.device).chunk(c.minibatches):
                loss, terms = self.loss(batch.rows(index))
                self.adam.step(torch.autograd.grad(loss, self.parameters), lr)
                parts.append(terms)
        self.updates_done += 1
        kl = float((batch.logprobs - batch.ref_logprobs).sum(1).mean())
        record = {"score": float(batch.scores.mean()), "kl": kl, "kl_coef": self.kl_coef}
        record["sampler_kl"] = float(batch.sampler_kl.mean())
        self.kl_coef *= 1 + min(max(kl / c.kl_target - 1, -0.2), 0.2) * size / c.horizon
        return record | metrics({name: torch.stack([p[name] for p in parts]) for name in parts[0]})


def metrics(parts: dict[str, Tensor]) -> dict[str, float]:
    """Compute the metrics of an update from stacked tensors: means over mini-batches, moments over all their tokens."""
    difference = parts["difference"].double()
    ratio = difference.exp()
    values = {
        "approxkl": 0.5 * (difference**2).mean(),
        "clipfrac": parts["clipped"].double().mean(),
        "ratio_mean": ratio.mean(),
        "ratio_var": ratio.var(correction=0),
        "ratio_max": ratio.max(),
        "ratio_min": ratio.min(),
        "logprob_diff_mean": difference.mean(),
        "logprob_diff_var": difference.var(correction=0),
        "logprob_diff_max": difference.max(),
        "logprob_diff_min": difference.min(),
    }
    values |= {name: parts[name].mean() for name in ("policy_loss", "value_loss", "entropy")}
    values["return_mean"] = parts["returns"].mean()
    return {name: float(value) for name, value in values.items()}


def queries(texts: Sequence[str], vocabulary: dict[str, int], length: int) -> list[list[int]]:
    """Return the queries of texts: after the first full stop, at most `length` tokens, up to the last full stop.

    Texts without such a query are skipped.
    """
    prompts = []
    for text in texts:
        words = text.split()
        start = words.index(".") + 1 if "." in words else len(words)
        excerpt = words[start if start < len(words) else 0 :][:length]
        if "." in words and "." in excerpt:
            end = len(excerpt) - excerpt[::-1].index(".")
            prompts.append([vocabulary[word] for word in excerpt[:end]])
    return prompts


def scores(
    responses: Tensor,
    decode: Callable[[list[int]], str],
    reward: Callable[[str], float],
    *,
    after: int = 16,
    penalty: float = -1.0,
) -> Tensor:
    """Return scores [B]: the reward of a response up to its first full stop from token `after` on, else the penalty."""
    rewards = []
    for row in responses.tolist():
        end = next((i for i in range(after, len(row)) if decode([row[i]]) == "."), None)
        rewards.append(penalty if end is None else reward(decode(row[: end + 1])))
    return torch.tensor(rewards)


def _last_present(mask: Tensor) -> Tensor:
    """Return, for each column, the index of the last present token at or before it [B, Q+R]."""
    return (torch.arange(mask.shape[1], device=mask.device) * mask).cummax(1).values


def _at(states: Tensor, index: Tensor) -> Tensor:
    """Select states [B, N, H] of columns `index` [B, N]."""
    return states.gather(1, index[..., None].expand(-1, -1, states.shape[-1]))


def _chosen(logprobs: Tensor, responses: Tensor) -> Tensor:
    return logprobs.gather(-1, responses[..., None])[..., 0]
