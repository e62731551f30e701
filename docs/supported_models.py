"""Write docs/supported-models.md from docs/supported-models.yaml: `python docs/supported_models.py`."""

from __future__ import annotations

from pathlib import Path

import yaml

HERE = Path(__file__).parent
DATA, PAGE = HERE / "supported-models.yaml", HERE / "supported-models.md"

STATES = {
    "packed": "packed",
    "unpacked": "unpacked",
    "unsupported": "not supported",
    "unverified": "not verified",
}
INTRODUCTION = """\
# Supported models

This page lists the families of causal language models in transformers, and how realign runs them. The family of a model
is `model_type` in its `config.json`. To check a model, run `realign check`, which loads it and reports an error or a
warning:

```bash
realign check experiment=grpo models.actor.path=MODEL data.path=prompts.jsonl \\
    interfaces.reward.function=reward.py:score
```

{counts}

When a model is loaded, a probe compares packed sequences, shared prompts and decode steps with each sequence alone.
The probe selects one of these modes:

- **Packed.** All sequences of a micro-batch run in one pass without padding. Rollouts use a static cache with
  continuous batching. In hybrid families, attention layers run packed. Recurrent layers (state-space models, gated
  delta rule, short convolutions) run on right-padded rows with one sequence each, through the code and kernels of
  transformers. A rollout keeps their states next to the KV cache.
- **Unpacked.** The probe found a difference, so the model runs on batches of right-padded sequences of similar length
  with its own attention. A warning names the reason. Rollouts use the cache of transformers, with one batch for the
  responses of each prompt. If this cache is not exact, each token recomputes the whole text. The results are as exact
  as those of packed models, but training and sampling are slower. Shared prompts, `value_head.layers`,
  `branch=reference` without LoRA, and several ranks are not available.
- **Not supported.** The model is not causal, or its head is not a linear layer over the last hidden states. Loading
  raises an error.

`tests/models/network/test_families.py` builds a tiny random model of each verified family, with transformers 5.23 on
CPU. It compares greedy tokens with `generate` of transformers, and log-probs of rollouts with scoring. For `moshi` and
`xlstm`, it compares only log-probs. Families that are not verified have no tiny config in the tests. The probe decides
when such a model is loaded. `qwen2_vl` and `qwen2_5_vl` also read [images](guides/images.md). Other families with
images or audio train on text only.

[Encoder-decoder models](guides/encoder-decoder.md) such as T5 and BART run unpacked, and their page lists the verified
families. The rows of `bart`, `mbart` and other families below are about their decoders, loaded as causal models.

`python docs/supported_models.py` writes this page from `docs/supported-models.yaml`.

| family | mode | note |
|---|---|---|
"""


def read() -> dict[str, dict[str, str]]:
    """Read the table: family -> `state`, and `note` if there is one."""
    families: dict[str, dict[str, str]] = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    return families


def render(families: dict[str, dict[str, str]]) -> str:
    """Render the page."""
    states = [row["state"] for row in families.values()]
    counts = ", ".join(f"{states.count(state)} {label}" for state, label in STATES.items())
    rows = (f"| `{name}` | {STATES[row['state']]} | {row.get('note', '')} |\n" for name, row in families.items())
    return INTRODUCTION.format(counts=f"Of {len(states)} families: {counts}.") + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(render(read()), encoding="utf-8")
