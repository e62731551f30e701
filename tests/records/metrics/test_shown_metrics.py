from __future__ import annotations

import io
from dataclasses import dataclass

from rich.console import Console

from realign.api import ModelInterface, Panel
from realign.interfaces import ppo, sft
from realign.interfaces.components.aggregation import SeqMeanTokenSum
from realign.interfaces.components.kl import KLPenalty, KLPlace
from realign.interfaces.critic import PPOCriticInterface
from realign.interfaces.ppo import PPOActorInterface
from realign.interfaces.sft import SFTInterface
from realign.records.metrics.live_display import MOST, LiveDisplay
from realign.records.metrics.shown_metrics import (
    headline,
    metric_summaries,
    panels,
    with_held_out,
)
from tests.toys import CountToken


@dataclass
class Own(ModelInterface):
    """User interface without declarations."""

    def train_step(self, model, data, mb_spec):
        return {}


class Named(Own):
    """Interface that declares a headline and no charts."""

    def headline(self) -> tuple[str, ...]:
        return ("regret", "loss")


OWN_CRITIC = {"actor": PPOActorInterface(critic="own"), "critic": PPOCriticInterface(), "reward": CountToken()}


def test_the_leading_role_comes_first_and_others_have_a_prefix():
    shown = headline(ppo.dataflow(OWN_CRITIC), OWN_CRITIC, "actor")
    assert shown[:3] == ("reward", "eval/reward", "entropy")
    assert shown.index("approx_kl") < shown.index("critic/explained_variance") < shown.index("response_tokens")
    assert "critic/value_loss" in shown


def test_charts_of_all_trained_roles_are_drawn_and_those_of_one_title_are_merged():
    both = OWN_CRITIC | {"actor": PPOActorInterface(critic="shared")}
    charts = {chart.title: dict(chart.metrics) for chart in panels(ppo.dataflow(OWN_CRITIC), both, "actor")}
    assert charts["explained variance of returns"] == {
        "explained_variance": "values",
        "critic/explained_variance": "values",
    }
    assert next(iter(charts)) == "reward per response"
    assert list(charts)[-2:] == ["response length (tokens)", "gradient norm"]


def test_an_interface_without_charts_gets_one_for_each_metric_of_its_headline():
    titles = [chart.title for chart in panels(sft.dataflow(), {"actor": Named()}, "actor")]
    assert titles == ["reward per response", "regret", "loss", "response length (tokens)", "gradient norm"]


def test_the_progress_line_shows_the_headline_or_the_first_metrics():
    def line(interface: ModelInterface, metrics: dict[str, float]) -> str:
        out = io.StringIO()
        console = Console(file=out, width=200)
        shown = headline(sft.dataflow(), {"actor": interface}, "actor")
        with LiveDisplay(console, "run", 1, shown) as display:
            display.log(1, metrics)
        return out.getvalue().strip().removeprefix("run step 1/1  ")

    metrics = {"time/x_s": 9.0, "other": 3.0, "nll": 1.0, "loss": 2.0, "step_s": 4.0}
    assert line(SFTInterface(), metrics) == "nll 1  step_s 4"  # the loss is the same number
    assert line(SFTInterface(aggregation=SeqMeanTokenSum()), metrics) == "loss 2  nll 1  step_s 4"
    assert line(SFTInterface(), {"nll": 1.0, "eval/loss": 3.0, "eval/nll": 3.0}) == "nll 1  eval/nll 3"
    assert line(Own(), metrics) == "other 3  nll 1  loss 2"
    assert line(SFTInterface(), {"time/x_s": 9.0, "other": 3.0}) == "other 3"


def test_every_trained_role_has_a_place_on_the_progress_line_and_in_the_summary():
    """The headline of the actor alone fills all places."""
    interfaces = OWN_CRITIC | {"actor": PPOActorInterface(critic="own", kl=KLPenalty(place=KLPlace.reward, coef=0.1))}
    shown = headline(ppo.dataflow(interfaces), interfaces, "actor")
    metrics = dict.fromkeys((name for name in shown if not name.startswith("eval/")), 1.0)
    out = io.StringIO()
    with LiveDisplay(Console(file=out, width=300), "run", 1, shown) as display:
        display.log(1, metrics)
    line = out.getvalue()
    assert line.count(" 1") == MOST + 1
    assert "critic/explained_variance 1" in line
    assert line.index("reward 1") < line.index("critic/")
    evaluated = {f"eval/{name}": 0.5 for name in "abcdefgh"}
    summaries = metric_summaries([{"step": 1, **metrics, **evaluated}], shown)
    assert [one.name for one in summaries][-2:] == ["reward", "critic/explained_variance"]


def test_held_out_values_stand_beside_their_metric_or_in_a_chart_of_their_own():
    charts = (Panel("both", {"a": "first", "b": "second"}), Panel("one", {"c": "training batch", "eval/c": "mine"}))
    shown = with_held_out(charts, ["a", "eval/a", "eval/c", "eval/d", "eval/mean@4", "eval/hard/mean@4", "step"])
    assert [(chart.title, dict(chart.metrics)) for chart in shown] == [
        ("both", {"a": "first", "b": "second", "eval/a": "first, held out"}),
        ("one", {"c": "training batch", "eval/c": "mine"}),
        ("other held-out metrics", {"eval/d": "d"}),
    ]
    assert with_held_out(charts, ["a"]) == charts


def test_a_metric_of_rounding_noise_is_not_summarized_and_one_of_zeros_is():
    history = [{"step": step, "reward": 0.0, "kl": 1e-13 * step, "entropy": 1.0} for step in (1, 2)]
    shown = metric_summaries(history, ("reward", "kl", "entropy"))
    assert [metric.name for metric in shown] == ["reward", "entropy"]
