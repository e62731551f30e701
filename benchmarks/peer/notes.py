"""Notes on what a table shows, and on ratios that do not transfer to GPUs."""

from __future__ import annotations

from collections.abc import Sequence

BY_SCENARIO = {
    "real32": "`real` in fp32, which also replaces `real` on a CPU without instructions for bf16.",
    "large_vocabulary": "Without Triton, as on a CPU, TRL 1.16 computes the language-model head and the entropy at all "
    "positions, including prompts and padding. With Triton on a GPU, it computes them at predicted tokens only. This "
    "ratio does not transfer to GPUs.",
    "ppo_long_tail": "The side of TRL is the experimental PPO trainer of version 1.12. Later versions have none.",
}
BY_PART = {
    "steps": "TRL samples with generate of transformers, for which its users substitute vLLM on GPUs. Compiled decode "
    "steps, concurrent passes and one core for small products of realign exist on CPUs only. These ratios do not "
    "transfer to GPUs.",
    "rollouts": "llama.cpp returns no log-probs. It computes the prompt of a group for every response. So does vLLM "
    "with prompts shorter than a block of its cache. vLLM is built for GPUs and for many requests: these ratios do not "
    "transfer to GPUs.",
}


def marked(scenario: str) -> str:
    """Return the name of a scenario in a table, with a star if it has a note."""
    return f"{scenario} *" if scenario in BY_SCENARIO else scenario


def notes(scenarios: Sequence[str], parts: Sequence[str]) -> str:
    """Return the notes of the scenarios and parts of a report."""
    lines = [f"{part}: {text}" for part, text in BY_PART.items() if part in parts]
    lines += [f"{name} *: {BY_SCENARIO[name]}" for name in scenarios if name in BY_SCENARIO and "steps" in parts]
    return "\n".join(lines)
