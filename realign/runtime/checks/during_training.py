"""Check a run while it trains: log-probs before the first update, and signs that it trains without learning."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence

from realign.api import RPC, ModelSpec
from realign.errors import RunError
from realign.runtime.evaluation.scores import CONSTANT, MOST_COMMON, is_collapsed


def default_tolerance(spec: ModelSpec) -> float:
    """Return the tolerance for the log-prob difference, in nats: higher if the model computes in bf16."""
    compute = spec.facts().compute
    return 0.1 if compute is not None and compute.precision == "bfloat16" else 1e-3


def check_ratio(rpc: RPC, difference: float, tolerance: float, *, strict: bool) -> None:
    """Check the log-prob difference of a training RPC before its first update, when both sides have the same policy.

    Args:
        rpc: the training RPC.
        difference: largest absolute difference in nats between sampler and trainer.
        tolerance: largest valid difference (`ratio_tolerance`).
        strict: raise an error instead of a warning.

    Raises:
        RunError: the difference is larger, and `strict` is set.
    """
    if difference <= tolerance:
        return
    message = (
        f"ratio_tolerance={tolerance:g}: in {rpc.name}, log-probs of sampler and trainer differ by up to "
        f"{difference:.3g} nats before the first update, so the probability ratio is not 1. Check the sampler's "
        "weights, the temperature on both sides, dropout, and bf16 (up to 0.1 is normal). "
        f"interfaces.{rpc.model}.recompute=true removes the difference from the ratio. "
        "docs/studies/mismatch.md has the correction for each kind of difference."
    )
    if strict:
        raise RunError(message)
    warnings.warn(f"{message} Training continues.", stacklevel=2)


RECENT = 10
"""Training steps that `signs` looks at. It does not judge fewer."""
_ALMOST_ALL = 0.9
"""Fraction of equal responses that is suspicious even if the reward of a constant answer is unknown."""
_ZERO = "zero_gradient_steps"


def signs(history: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Return what is wrong at the end of `history`: a sentence with its remedy for each metric that shows it.

    Args:
        history: records of all steps so far, with the key `step`.
    """
    return dict([*_idle(history), *_constant(history)])


def _idle(history: Sequence[Mapping[str, float]]) -> Iterator[tuple[str, str]]:
    """Yield a sentence for each role whose recent steps mostly had no gradient."""
    names = dict.fromkeys(name for record in history[-RECENT:] for name in record if name.endswith(_ZERO))
    for name in names:
        role = name.removesuffix(_ZERO)
        recent = [record for record in history[-RECENT:] if name in record]
        # a step of several mini-batches counts only if none of them changed the weights
        idle = sum(1 for record in recent if record[name] and not record.get(f"{role}optimizer_steps"))
        if len(recent) == RECENT and 2 * idle >= RECENT:
            yield (
                name,
                f"{idle} of the last {RECENT} steps had no gradient{f' ({role[:-1]})' if role else ''} and "
                "changed no weight. In most cases all responses to each prompt have equal rewards: the task is solved, "
                "the prompts are too hard, or the policy always gives the same response. Unless the task is solved, "
                "change the prompts, sample more responses per prompt or at a higher temperature, or set "
                "dynamic_sampling.",
            )


def _constant(history: Sequence[Mapping[str, float]]) -> Iterator[tuple[str, str]]:
    """Yield a sentence for each evaluation whose responses are mostly equal and earn no more than a constant answer."""
    last = {name: record for record in history for name in record if name.endswith(f"/{MOST_COMMON}")}
    for name, record in last.items():
        prefix = name.removesuffix(MOST_COMMON)
        # an untrained policy may well repeat itself
        if record["step"] == 0 or not is_collapsed(record, prefix):
            continue
        reward, constant = record.get(f"{prefix}reward"), record.get(f"{prefix}{CONSTANT}")
        if constant is None and record[name] < _ALMOST_ALL:
            continue
        if constant is not None and reward is not None and reward > constant:
            continue
        which = prefix.removeprefix("eval/").removesuffix("/")
        equal = "All" if record[name] == 1 else f"{record[name]:.0%} of the"
        earned = ""
        if constant is not None:
            earned = (
                f" This answer to every prompt has a mean reward of {constant:.4g}, and the policy has {reward:.4g}: "
                "it has learned no more than one answer."
            )
        yield (
            name,
            f"{equal} held-out responses{f' of {which}' if which else ''} are the same one.{earned} Look at "
            "eval_samples.jsonl. Use data in which no single answer is right so often, warm up with SFT, lower the "
            "learning rate, or add a KL penalty.",
        )
