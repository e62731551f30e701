"""Settings as formulas, for the table that is shown at launch."""

from __future__ import annotations

from tests.frozen.functional import Normalization, PolicyObjective, Scope


def normalization_formula(spec: Normalization, x: str = "A") -> str:
    """`spec` as a formula for people; `x` is what it normalises."""
    if (spec.mean, spec.std) == (Scope.none, Scope.none):
        return "none"
    mean = {Scope.none: "", Scope.batch: " - mean(batch)", Scope.group: " - mean(group)"}[spec.mean]
    if spec.leave_one_out:
        mean = mean.replace(")", " without itself)")
    if spec.std is Scope.none:
        return f"{x}{mean} per {spec.level.value}"
    kind = "sample" if spec.unbiased else "population"
    deviation = f"{kind} std({spec.std.value})"
    below = f"sqrt({deviation}^2 + {spec.eps:g})" if spec.eps_inside_sqrt else f"({deviation} + {spec.eps:g})"
    return f"({x}{mean}) / {below} per {spec.level.value}"


def objective_formula(
    objective: PolicyObjective, clip_low: float | None, clip_high: float, tau_pos: float, tau_neg: float
) -> str:
    """A policy objective with its bounds."""
    if objective is PolicyObjective.sapo:
        return f"sapo, temperatures {tau_pos:g} and {tau_neg:g}"
    if not objective.has_clip:
        return f"{objective.value}, no ratio"
    logarithm = objective is PolicyObjective.gmpo
    start = 0 if logarithm else 1
    low = ("-inf" if logarithm else "0") if clip_low is None else f"{start - clip_low:g}"
    of = {PolicyObjective.gspo: "sequence ratio", PolicyObjective.gmpo: "log-ratio"}.get(objective, "ratio")
    return f"{objective.value}, {of} in [{low}, {start + clip_high:g}]"


__all__ = ["normalization_formula", "objective_formula"]
