"""Named evaluation sets, scoring by the graph, pass@k and mean@n."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from realign.api import GenerationConfig
from realign.errors import ConfigError, SettingsError
from realign.interfaces import grpo, sft
from realign.interfaces.rule_reward import RuleRewardInterface
from realign.records.metrics.samples import readable
from realign.rewards.terms import FunctionTerm
from realign.runtime import Evaluation, Experiment, run
from realign.runtime.checks.parts import check_parts
from realign.runtime.local import LocalRuntime
from tests.config_parts import Bigram, CountThrees, Prompts
from tests.formulas import by_enumeration

SAMPLED = GenerationConfig(n=4, max_new_tokens=4, fixed_length=True)
GREEDY = GenerationConfig(max_new_tokens=4, fixed_length=True, greedy=True)
FUNCTIONS = """\
def threes(prompt, response, row):
    return response.count('3')

def starts_with_3(prompt, response, row):
    return None if row['n'] % 5 == 1 and response.count('3') == 0 else float(response.lstrip().startswith('3'))
"""


def rewards(tmp_path: Path) -> RuleRewardInterface:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    names = {"threes": 0.5, "starts_with_3": 1.0}
    functions = {name: FunctionTerm(f"{file}:{name}", weight=weight) for name, weight in names.items()}
    return RuleRewardInterface(functions=functions, workers=0)


def experiment(tmp_path: Path, **changes) -> Experiment:
    interfaces = {"actor": grpo.GRPOActorInterface(generation=SAMPLED), "reward": rewards(tmp_path)}
    settings = {
        "name": "sets",
        "steps": 4,
        "batch_prompts": 4,
        "graph": grpo.dataflow(interfaces),
        "interfaces": interfaces,
        "models": {"actor": Bigram()},
        "data": Prompts(16),
        "output_dir": tmp_path / "run",
        "checkpoint": None,
    }
    return Experiment(**(settings | changes))


def test_the_graph_scores_as_an_interface_of_its_own_would(tmp_path):
    values = {}
    for name, reward in (("graph", None), ("own", rewards(tmp_path))):
        runtime = LocalRuntime(experiment(tmp_path, evaluation=Evaluation(Prompts(6), reward, GREEDY)))
        values[name], samples = runtime.evaluate()
        runtime.close()
        assert {*samples[0]["rewards"]} == {"threes", "starts_with_3"}
    for measured in values.values():
        del measured["time/evaluation_s"]
    assert values["graph"] == values["own"]
    assert "eval/rewards/threes/std" in values["graph"]


def test_each_set_has_its_own_metrics_samples_and_interval(tmp_path):
    sets = {"math": Evaluation(Prompts(3), None, GREEDY, every_steps=2), "code": Evaluation(Prompts(5), CountThrees())}
    made = experiment(tmp_path, evaluations=sets, evaluation=Evaluation(Prompts(2), CountThrees(), GREEDY))
    result = run(made)
    assert [r["step"] for r in result.history if "eval/math/reward" in r] == [0, 2, 4]
    assert [r["step"] for r in result.history if "eval/code/reward" in r] == [0, 4]
    assert "eval/math/rewards/threes/mean" in result.history[0]
    assert "eval/code/rewards/threes/mean" not in result.history[0]
    samples = [json.loads(line) for line in (tmp_path / "run" / "eval_samples.jsonl").read_text().splitlines()]
    shown = {
        (s["step"], s.get("evaluation")): sum(
            o["step"] == s["step"] and o.get("evaluation") == s.get("evaluation") for o in samples
        )
        for s in samples
    }
    assert shown == {
        (0, None): 2,
        (0, "math"): 3,
        (0, "code"): 5,
        (2, "math"): 3,
        (4, None): 2,
        (4, "math"): 3,
        (4, "code"): 5,
    }
    assert len(result.samples) == 10


def test_a_set_measures_what_the_only_evaluation_measures(tmp_path):
    alone = LocalRuntime(experiment(tmp_path, evaluation=Evaluation(Prompts(6), None, SAMPLED)))
    named = LocalRuntime(experiment(tmp_path, evaluations={"math": Evaluation(Prompts(6), None, SAMPLED)}))
    value_of, other = alone.evaluate()[0], named.evaluate()[0]
    for name, value in value_of.items():
        if name.startswith("eval/"):
            assert other[name.replace("eval/", "eval/math/")] == value


def test_the_best_checkpoint_is_that_of_the_named_metric(tmp_path):
    sets = {name: Evaluation(Prompts(4), None, GREEDY) for name in ("math", "code")}
    run(experiment(tmp_path, evaluations=sets, save_best="eval/math/rewards/threes/mean"))
    assert (tmp_path / "run" / "best").is_dir()
    with pytest.raises(ConfigError, match=r"does not measure 'eval/maths/reward'; did you mean 'eval/math/reward'"):
        run(experiment(tmp_path, evaluations=sets, save_best="eval/maths/reward", overwrite=True))
    with pytest.raises(ConfigError, match=r"does not measure 'eval/reward'"):
        run(experiment(tmp_path, evaluations=sets, save_best="eval/reward", overwrite=True))
    with pytest.raises(SettingsError, match="the run has no evaluation that measures this metric"):
        check_parts(experiment(tmp_path, save_best="eval/math/reward"))


@pytest.mark.parametrize("of", [None, "starts_with_3"])
def test_pass_at_k_and_mean_at_n_are_those_of_the_samples(tmp_path, of):
    n, rows = 5, Prompts(40)
    generation = GenerationConfig(n=n, max_new_tokens=6, fixed_length=True)
    measured = Evaluation(rows, None, generation, pass_at=[1, 2, 4], success=1.0, success_of=of)
    runtime = LocalRuntime(experiment(tmp_path, evaluation=measured))
    values, _ = runtime.evaluate()
    _, scored = measured.measure(runtime, rows)
    records = readable(scored, 40, runtime.models["actor"].tokenizer.decode)
    assert len(records) == 40 * n
    groups: dict[str, list] = {}
    for record in records:
        groups.setdefault(record["id"], []).append(record)
    counts, means = [], []
    for group in groups.values():
        rated = [r for r in group if r["reward"] is not None]
        good = [(r["reward"] if of is None else r["rewards"][of]) >= 1.0 for r in rated]
        counts.append((len(rated), sum(good)))
        if rated:
            means.append(sum(r["reward"] for r in rated) / len(rated))
    assert len({c for _, c in counts}) > 2
    assert values[f"eval/mean@{n}"] == pytest.approx(sum(means) / len(means))
    for k in (1, 2, 4):
        passes = [by_enumeration(size, c, k) for size, c in counts if size >= k]
        assert values[f"eval/pass@{k}"] == pytest.approx(sum(passes) / len(passes))
    assert values["eval/pass@1"] < values["eval/pass@2"] < values["eval/pass@4"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pass_at": [8]}, r"pass_at=\[8\]: needs at least 8 responses per prompt. Set generation.n=8"),
        ({"pass_at": [0]}, r"pass_at\[0\]=0: must be at least 1"),
        ({"success": 0.5}, r"success=0\.5: has no effect with pass_at=\[\]"),
        ({"success_of": "threes"}, r"success_of=threes: has no effect"),
        ({"pass_at": [4], "sweep": {"n": [2]}}, r"pass_at=\[4\]: needs at least 4"),
    ],
)
def test_wrong_settings_of_pass_at_k_are_named(settings, message):
    with pytest.raises(SettingsError, match=message):
        Evaluation(Prompts(4), CountThrees(), SAMPLED, **settings)


def test_a_graph_without_rewards_cannot_score(tmp_path):
    with pytest.raises(ConfigError, match=r"evaluations\.math\.reward is not set, and no RPC of the graph writes"):
        check_parts(
            experiment(
                tmp_path,
                graph=sft.dataflow(),
                interfaces={"actor": sft.SFTInterface()},
                evaluations={"math": Evaluation(Prompts(4))},
            )
        )


def test_torch_is_deterministic_for_equal_sets(tmp_path):
    sets = {name: Evaluation(Prompts(4), None, SAMPLED, pass_at=[2]) for name in ("a", "b")}
    values, _ = LocalRuntime(experiment(tmp_path, evaluations=sets)).evaluate()
    for name, value in values.items():
        if name.startswith("eval/a/"):
            assert torch.tensor(values[name.replace("eval/a/", "eval/b/")]).equal(torch.tensor(value))
