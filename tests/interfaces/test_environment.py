from __future__ import annotations

import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec, Model, SequenceSample, stat_values, total_rewards
from realign.api.environment import EpisodeFailure, ToolCall
from realign.api.sample import INDEX_KEYS
from realign.api.sampling_mask import masks_of
from realign.engines import OptimizerSpec, SharedModel
from realign.environments.event_loops import EnvironmentFailure
from realign.errors import ConfigError
from realign.interfaces.components import GAE, Normalization, TurnReturns
from realign.interfaces.environment import EnvironmentInterface
from realign.interfaces.grpo import GRPOActorInterface
from realign.interfaces.ppo import PPOActorInterface, dataflow
from realign.interfaces.rule_reward import RuleRewardInterface
from realign.rewards.terms import FunctionTerm
from realign.runtime import CheckpointSpec, run
from realign.runtime.evaluation.scores import sequence_stats
from realign.testing import BigramEngine
from tests.endpoint.chat_families import (
    FAMILIES,
    SAID,
    THEN,
    TOOLS,
    WHY,
    family_renderer,
    histories,
    rendered,
    sampled,
)
from tests.endpoint.scripted import ScriptedSampler
from tests.environments.environment_fixtures import Bad, Blocking, Busy, Tool
from tests.environments.tool_fixtures import Calling
from tests.tiny import EOS, ids, tiny_engine, tiny_tokenizer
from tests.toys import BigramModel, Prompts
from tests.toys import experiment as toy_experiment

FIXTURES = "tests.environments.environment_fixtures"
TOOL = f"{FIXTURES}:Tool"
BAD = f"{FIXTURES}:Bad"
GO_ON, WON = ("", 0.0, False, False, {}), ("", 1.0, True, False, {})


class Scripted:
    """Engine that samples scripted texts by prompt name. Log-probs are -0.1 - position / 100."""

    def __init__(self, lines: dict[str, str], versions: bool = False) -> None:
        self.lines, self.versions = lines, versions
        self.contexts: list[dict[str, list[int]]] = []
        self.seeds: list[int] = []

    def generate(self, data, config, *, seed):
        assert config.n == 1
        self.seeds.append(seed)
        prompts = {i: x.tolist() for i, x in zip(data.ids, data.sequences("prompt_ids"), strict=True)}
        self.contexts.append(prompts)
        said = {i: ids(self.lines[i]) for i in prompts}
        out = SequenceSample.from_sequences(data.ids, {"input_ids": [[prompts[i] + said[i]] for i in data.ids]})
        given = [[[True] * len(prompts[i]) + [False] * len(said[i])] for i in data.ids]
        logprobs = [[[0.0] * len(prompts[i]) + [-0.1 - k / 100 for k in range(len(said[i]))]] for i in data.ids]
        out = out.with_tokens(prompt_mask=given, logprobs=logprobs).with_sequences(
            truncated=torch.tensor([said[i][-1] != EOS for i in data.ids])
        )
        if self.versions:
            turn = int(data.ids[0][-1])
            out = out.with_tokens(versions=torch.where(out["prompt_mask"], -1, 40 + turn).int())
        return out.with_tokens(loss_mask=~out["prompt_mask"])


def batch(rows: dict[str, dict], prompt: str = "ab") -> SequenceSample:
    data = SequenceSample.from_sequences(list(rows), {"prompt_ids": [[ids(prompt)] for _ in rows]})
    return data.with_metadata(row=list(rows.values()))


def settings(environment: str = TOOL, **changes) -> EnvironmentInterface:
    defaults = {"generation": GenerationConfig(max_new_tokens=8), "max_turns": 5, "max_episode_tokens": 40}
    return EnvironmentInterface(environment, **(defaults | changes))


def hold(interface: EnvironmentInterface, engine, data: SequenceSample, tokenizer=None, **model) -> SequenceSample:
    Tool.made.clear()
    player = Model("agent", engine, tokenizer or tiny_tokenizer(), **model)
    return interface.generate(player, data, MicroBatchSpec())


def lists(out: SequenceSample, key: str) -> list[list]:
    return [x.tolist() for x in out.sequences(key)]


def test_trap_a11_a_conversation_is_one_sequence_whose_sampled_tokens_alone_train():
    row = {"script": [("7\n", 0.25, False, False, {}), ("no", 0.5, False, False, {}), WON], "opening": "c"}
    engine = Scripted({"q/0/turn0": "x.", "q/0/turn1": "yz", "q/0/turn2": "w."})
    out = hold(settings(), engine, batch({"q": row}), version=3)
    assert lists(out, "input_ids") == [ids("abc") + ids("x.") + ids("7\n") + ids("yz") + ids("no") + ids("w.")]
    sampled = [0, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1]
    assert lists(out, "loss_mask") == [[bool(x) for x in sampled]]
    assert lists(out, "prompt_mask") == [[not x for x in sampled]]
    assert lists(out, "versions") == [[3 if x else -1 for x in sampled]]
    per_turn = [-0.1, -0.11]
    expected = [0, 0, 0, *per_turn, 0, 0, *per_turn, 0, 0, *per_turn]
    assert lists(out, "logprobs")[0] == pytest.approx(expected)
    assert (out["rewards"].tolist(), out["truncated"].tolist(), out["turns"].tolist()) == ([1.75], [False], [3])
    assert out.keys == {*settings().keys("generate").writes, *INDEX_KEYS}


def test_the_environment_hears_text_and_the_very_tokens():
    row = {"script": [GO_ON, WON]}
    hold(settings(), Scripted({"q/0/turn0": "hi.", "q/0/turn1": "so"}), batch({"q": row}))
    (world,) = Tool.made
    heard = [(r.text, list(r.token_ids), r.turn, r.truncated) for r in world.heard]
    assert heard == [("hi", ids("hi."), 0, False), ("so", ids("so"), 1, True)]
    assert world.closed == 1


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think"])
def test_tool_calls_content_and_reasoning_of_a_turn_reach_the_environment(name):
    family = next(family for family in FAMILIES if family.name == name)
    renderer = family_renderer(family)
    Calling.seen.clear()
    prompt = renderer.encode(rendered(family, histories(family)[0]))
    data = SequenceSample.from_sequences(["p"], {"prompt_ids": [[torch.tensor(prompt)]]})
    sampler = ScriptedSampler(renderer, sampled(family))
    model = Model("agent", None, renderer.tokenizer, external_sampler=sampler)
    interface = EnvironmentInterface(
        "tests.environments.tool_fixtures:Calling",
        generation=GenerationConfig(max_new_tokens=200),
        chat=True,
    )
    out = interface.generate(model, data.with_metadata(row=[{"tools": TOOLS}]), MicroBatchSpec())
    assert out["rewards"].tolist() == [1.0]
    assert out["turns"].tolist() == [2]
    called, answered = Calling.seen
    assert (called.content, called.reasoning) == ("", WHY)
    assert called.tool_calls == (ToolCall("multiply", '{"a": 3, "b": 4}'),)
    assert (answered.content, answered.reasoning, answered.tool_calls) == (SAID, THEN, ())
    assert "<tool_response>\n12\n</tool_response>" in sampler.prompts[1]


def test_an_environment_calls_the_tools_that_the_settings_name():
    family = next(family for family in FAMILIES if family.name == "qwen3")
    renderer = family_renderer(family)
    data = SequenceSample.from_sequences(["p"], {"prompt_ids": [[torch.tensor(renderer.encode("3 times 4?"))]]})
    model = Model(
        "agent", None, renderer.tokenizer, external_sampler=ScriptedSampler(renderer, [family.call, "12<|im_end|>"])
    )
    interface = EnvironmentInterface(
        "tests.environments.tool_fixtures:Given",
        tools=["tests.environments.tool_fixtures:multiply"],
        generation=GenerationConfig(max_new_tokens=200),
        chat=True,
    )
    interface.open()
    out = interface.generate(model, data.with_metadata(row=[{"tools": TOOLS}]), MicroBatchSpec())
    assert (out["rewards"].tolist(), out["turns"].tolist()) == ([1.0], [2])


def test_tools_for_an_environment_that_takes_none_are_a_configuration_error_before_the_run():
    interface = EnvironmentInterface(TOOL, tools=["tests.environments.tool_fixtures:multiply"])
    with pytest.raises(ConfigError, match=r"Tool\.reset\(self, row, tools=\)"):
        interface.open()


def test_trap_a12_sampled_tokens_are_never_encoded_again():
    """A sampler may split text differently than the tokenizer. Training uses the sampled tokens."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["hello"])
    assert tokenizer("hello", add_special_tokens=False)["input_ids"] == [97]
    row = {"script": [("hello", 0.0, False, False, {}), WON]}
    engine = Scripted({"q/0/turn0": "hello.", "q/0/turn1": "hello."})
    out = hold(settings(), engine, batch({"q": row}), tokenizer)
    assert lists(out, "input_ids") == [ids("ab") + ids("hello.") + [97] + ids("hello.")]
    assert engine.contexts[1]["q/0/turn1"] == ids("ab") + ids("hello.") + [97]


TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.previtem.role != 'tool' %}(user {% endif %}={{ m.content }}="
    "{% if loop.last or loop.nextitem.role != 'tool' %}<eos>\n{% endif %}"
    "{% else %}({{ m.role }} {{ m.content }}<eos>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}(assistant {% endif %}"
)


def chat_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_trap_a11_two_consecutive_tool_messages_are_one_turn_of_the_template():
    messages = [{"role": "tool", "content": "7"}, {"role": "tool", "content": "8"}]
    row = {"script": [(messages, 0.0, False, False, {}), ("9", 0.0, False, False, {}), WON]}
    engine = Scripted({"q/0/turn0": "x.", "q/0/turn1": "yz", "q/0/turn2": "w."})
    prompt = "(user q.\n(assistant "
    data = SequenceSample.from_sequences(["q"], {"prompt_ids": [[ids(prompt)]]}).with_metadata(row=[row])
    out = hold(settings(chat=True, max_episode_tokens=90), engine, data, chat_tokenizer())
    golden = [
        (True, prompt),
        (False, "x."),  # ends with the template's end token, which is not written twice
        (True, "\n(user =7==8=.\n(assistant "),
        (False, "yz"),  # cut off: the template's end of the turn is added
        (True, ".\n(user =9=.\n(assistant "),
        (False, "w."),
    ]
    assert lists(out, "input_ids") == [[i for _, text in golden for i in ids(text)]]
    assert lists(out, "prompt_mask") == [[given for given, text in golden for _ in text]]
    assert lists(out, "loss_mask") == [[not given for given, text in golden for _ in text]]


def test_episodes_end_by_the_environment_by_turns_and_by_tokens():
    never = [("7", 0.0, False, False, {})] * 9
    rows = {
        "won": {"script": [WON]},
        "cut": {"script": [GO_ON, ("", 0.5, False, True, {})]},
        "both": {"script": [("", 0.5, True, True, {})]},
        "turns": {"script": never},
        "tokens": {"script": [("0123456789", 0.25, False, False, {})] * 9},
    }
    lines = {f"{name}/0/turn{k}": "xyz." for name in rows for k in range(3)}
    engine = Scripted(lines)
    interface = settings(max_turns=3, max_episode_tokens=24, generation=GenerationConfig(max_new_tokens=8))
    out = hold(interface, engine, batch(rows))
    assert out["truncated"].tolist() == [False, True, False, True, True]
    assert out["turns"].tolist() == [1, 2, 1, 3, 2]
    assert out["rewards"].tolist() == [1.0, 0.5, 0.5, 0.0, 0.5]
    after = [len(x) - 2 for x in lists(out, "input_ids")]
    # 4 sampled and 10 observed tokens leave room for 8 of 24. With another 4 and 10 tokens there is no room, so they
    # are not appended.
    assert after == [4, 8, 4, 4 + 1 + 4 + 1 + 4, 4 + 10 + 4]
    assert max(after) <= interface.plan().longest_response == 24
    assert [len(c) for c in engine.contexts] == [5, 3, 1]  # all live episodes take their turn in the same call
    assert [world.closed for world in Tool.made] == [1] * 5


def test_dense_rewards_stand_at_the_last_sampled_token_of_each_turn():
    row = {"script": [("77", 0.25, False, False, {}), ("", -1.0, True, False, {})]}
    engine = Scripted({"q/0/turn0": "xy.", "q/0/turn1": "z."})
    out = hold(settings(dense=True), engine, batch({"q": row}))
    assert lists(out, "dense_rewards") == [[0, 0, 0, 0, 0.25, 0, 0, 0, -1.0]]
    assert lists(out, "turn_rewards") == lists(out, "dense_rewards")
    assert out["rewards"].tolist() == [0.0]


def test_trap_c3_credit_passes_over_observations():
    """r = [0, 0, 1] on mask = [1, 0, 1] with gamma 0.5: the returns are [0.5, ., 1], as without the observation."""
    row = {"script": [("7", 0.0, False, False, {}), WON]}
    out = hold(settings(), Scripted({"q/0/turn0": "x", "q/0/turn1": "y"}), batch({"q": row}, prompt="a"))
    actor = PPOActorInterface(advantage=GAE(gamma=0.5, lam=1.0))
    credited = actor.credit(Model("actor", BigramEngine()), out, MicroBatchSpec())
    assert credited["loss_mask"].tolist() == [False, True, False, True]
    assert credited["returns"][[1, 3]].tolist() == [0.5, 1.0]


def test_an_algorithm_learns_nothing_from_what_was_observed():
    """Replacing observations by others of the same length, with impossible log-probs, does not change the trained
    policy."""
    row = {"script": [("7", 0.0, False, False, {}), WON]}
    lost = {"script": [("7", 0.0, False, False, {}), ("", 0.0, True, False, {})]}
    lines = {f"{q}/{j}/turn{k}": "x." for q in "qr" for j in range(2) for k in range(2)}
    out = hold(
        settings(generation=GenerationConfig(max_new_tokens=8, n=2)), Scripted(lines), batch({"q": row, "r": lost})
    )
    out = out.with_sequences(rewards=torch.tensor([1.0, 0.0, 0.5, 0.0]))
    trained = []
    for fill in (0.0, math.nan):
        engine = BigramEngine(vocabulary=97, seed=1)
        dirty = out.with_tokens(logprobs=torch.where(out["loss_mask"], out["logprobs"], fill))
        GRPOActorInterface(generation=GenerationConfig(n=2)).train_step(Model("actor", engine), dirty, MicroBatchSpec())
        trained.append(engine.logits_VV.clone())
    assert torch.equal(*trained)
    assert not torch.equal(trained[0], BigramEngine(vocabulary=97, seed=1).logits_VV)


def test_an_environment_that_fails_costs_its_own_episode_the_reward(caplog):
    hows = ["good", "raise", "exit", "cancel", "reset"]
    rows = {how: {"how": how} for how in hows}
    engine = Scripted({f"{how}/0/turn0": "x." for how in hows})
    Bad.closed = 0
    interface = settings(BAD, max_failed_fraction=0.8)
    out = hold(interface, engine, batch(rows))
    assert out["rewards"].isnan().tolist() == [False, True, True, True, True]
    assert out["truncated"].tolist() == [False] * 5
    assert lists(out, "input_ids")[4] == ids("ab")  # this episode had not begun
    assert Bad.closed == 5
    assert caplog.text.count("failed in an episode") == 1
    assert 'raise RuntimeError("the tool broke")' in caplog.text
    assert "cannot close" in caplog.text
    caplog.clear()
    hold(interface, engine, batch(rows))
    assert "failed in an episode" not in caplog.text


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ("four", r"step returned 4 values, expected 5: observation, reward"),
        ("nan", r"the reward is nan \(float\), expected a number that is finite in float32"),
        ("huge", r"the reward is 1000+\.\.\. \(int\), expected a number that is finite"),
        ("half a character", r"the tokenizer cannot encode '.ud800' \(str\)"),
        ("text", r"the reward is '1' \(str\)"),
        ("ends", r"terminated is 'yes' \(str\), expected True or False"),
        ("observation", r"the observation is 3\.5 \(float\), expected text, a list of token ids"),
        ("unknown", r"token id 97 is unknown: the tokenizer has ids 0 to 96"),
        ("negative", r"token id -1 is unknown"),
        ("messages", r"the observation contains chat messages, which require chat=true"),
        ("one value", r"reset returned '' \(str\), expected 2 values"),
    ],
)
def test_an_answer_that_is_none_names_the_class_and_what_was_found(how, problem):
    with pytest.raises(EnvironmentFailure, match=rf"ValueError: environment {BAD}: {problem}"):
        hold(settings(BAD), Scripted({"q/0/turn0": "x."}), batch({"q": {"how": how}}))


def test_too_many_failures_end_the_run_with_the_first_traceback():
    rows = {how: {"how": how} for how in ("good", "raise", "raise2", "raise3")}
    rows |= {"raise2": {"how": "raise"}, "raise3": {"how": "raise"}}
    engine = Scripted({f"{how}/0/turn0": "x." for how in rows})
    with pytest.raises(EnvironmentFailure, match=r"failed in 3 of 4 episodes \(3 times RuntimeError: the tool broke\)"):
        hold(settings(BAD), engine, batch(rows))
    out = hold(settings(BAD, max_failed_fraction=0.75), engine, batch(rows))
    assert out["rewards"].isnan().sum() == 3


def test_an_environment_that_hangs_is_left_behind():
    engine = Scripted({"q/0/turn0": "x.", "r/0/turn0": "x."})
    interface = settings(BAD, timeout_s=2.0)
    out = hold(interface, engine, batch({"q": {"how": "hang"}, "r": {"how": "good"}}))
    assert out["rewards"].isnan().tolist() == [True, False]
    with pytest.raises(EnvironmentFailure, match=r"1 times no answer within timeout_s=0\.2"):
        hold(settings(f"{FIXTURES}:Stuck", timeout_s=0.2), engine, batch({"q": {}}))
    Blocking.release.clear()
    with pytest.raises(EnvironmentFailure, match=r"1 times no answer within timeout_s=0\.2"):
        hold(settings(f"{FIXTURES}:Threaded", timeout_s=0.2), engine, batch({"q": {}}))
    Blocking.release.set()  # only now does its thread end


@pytest.mark.parametrize("dense", [False, True])
def test_a_turn_that_times_out_gets_its_reward_if_there_is_one_and_failures_are_counted_by_kind(dense):
    rows = {how: {"how": how} for how in ("hang", "TimeoutError", "good", "raise", "ConnectionError", "reset")}
    engine = Scripted({f"{how}/0/turn0": "x." for how in rows})
    learned = settings(BAD, timeout_s=0.2, timeout_reward=-2.0, max_failed_fraction=0.5, dense=dense)
    out = hold(learned, engine, batch(rows))  # 3 of 6 fail; the time-outs are no failures
    assert total_rewards(out).tolist() == pytest.approx([-2, -2, 1, *[math.nan] * 3], nan_ok=True)
    assert out["failure"].tolist() == [1, 1, 0, 2, 4, 2]
    fractions = {"timeout": 1 / 3, "exception": 1 / 3, "blocked": 0, "infrastructure": 1 / 6}
    metrics = stat_values(sequence_stats(out))
    assert {kind: metrics[f"failures/{kind}"] for kind in EpisodeFailure} == pytest.approx(fractions)
    with pytest.raises(EnvironmentFailure, match="failed in 5 of 6 episodes"):
        hold(settings(BAD, timeout_s=0.2), engine, batch(rows))


def test_an_episode_may_change_its_row():
    """Four episodes of one row, of two prompts and two batches, begin with the same board."""
    row = {"board": [0, 0]}
    engine = Scripted({f"{name}/{j}/turn{turn}": "x." for name in "qr" for j in range(2) for turn in range(2)})
    interface = settings(f"{FIXTURES}:Board", generation=GenerationConfig(n=2, max_new_tokens=8))
    for _ in range(2):
        out = hold(interface, engine, batch({"q": row, "r": row}))
        assert out["rewards"].tolist() == [3 + 4] * 4  # the sizes of the board after each turn
    assert row == {"board": [0, 0]}


def test_calls_of_several_threads_are_bounded_together():
    Busy.now = Busy.most = 0
    two = settings(
        f"{FIXTURES}:Busy",
        concurrency=2,
        generation=GenerationConfig(n=4, max_new_tokens=8),
    )

    def one(q):
        return hold(two, Scripted({f"{q}/{j}/turn0": "x." for j in range(4)}), batch({q: {}}))["rewards"].tolist()

    with ThreadPoolExecutor(5) as pool:
        assert list(pool.map(one, "abcde")) == [[1.0] * 4] * 5
    assert (Busy.now, Busy.most) == (0, 2)


def seeds(interface: EnvironmentInterface, order: list[str], **model) -> dict[tuple[str, int], int]:
    n = interface.generation.n
    lines = {f"{q}/{j}/turn0": "x." for q in order for j in range(n)}
    hold(interface, Scripted(lines), batch({q: {"script": [WON]} for q in order}), **model)
    return {(q, j): Tool.made[i * n + j].seed for i, q in enumerate(order) for j in range(n)}


def test_seeds_follow_from_call_prompt_and_episode_not_from_the_batch():
    two = settings(generation=GenerationConfig(n=2, max_new_tokens=8))
    drawn = seeds(two, ["q", "r"], seed=5)
    assert len(set(drawn.values())) == 4
    assert {key: seed for key, seed in seeds(two, ["z", "r"], seed=5).items() if key[0] == "r"} == {
        ("r", 0): drawn["r", 0],
        ("r", 1): drawn["r", 1],
    }
    assert set(seeds(two, ["q", "r"], seed=6).values()).isdisjoint(drawn.values())
    assert set(seeds(two, ["q", "r"], seed=5, version=1).values()).isdisjoint(drawn.values())
    shared = seeds(replace(two, same_seed=True), ["q", "r"], seed=5)
    assert (len(set(shared.values())), shared["q", 0]) == (2, shared["q", 1])


def test_of_several_processes_one_asks_and_all_hear_the_same():
    """The leading process runs environments. The other process receives the results, and creates no environment."""
    rows = {"q": {"script": [("7", 0.5, False, False, {}), WON]}, "r": {"script": [WON]}}
    lines = {"q/0/turn0": "x.", "q/0/turn1": "y.", "r/0/turn0": "z."}
    heard = []

    def leading(call):
        heard.append(call())
        return heard[-1]

    first = hold(settings(), Scripted(lines), batch(rows), lead=leading)
    assert len(Tool.made) == 2
    second = hold(settings(), Scripted(lines), batch(rows), lead=lambda call: pickle.loads(pickle.dumps(heard.pop(0))))
    assert Tool.made == []
    assert all(torch.equal(first[key], second[key]) for key in first.keys)


@pytest.fixture
def functions(tmp_path):
    path = tmp_path / "functions.py"
    path.write_text(
        "def text(prompt, response, row):\n"
        "    assert prompt == 'abc', prompt\n"
        "    return len(response)\n"
        "def alone(prompt, responses, row):\n"
        "    return [float(responses.count(response) == 1) for response in responses]\n"
    )
    terms = {"text": FunctionTerm(f"{path}:text", weight=0.5), "alone": FunctionTerm(f"{path}:alone")}
    return RuleRewardInterface(functions=terms, workers=0)


@pytest.mark.parametrize("dense", [False, True])
def test_functions_score_whole_episodes_and_their_rewards_are_added_to_those_of_the_environment(functions, dense):
    row = {"script": [("7\n", 0.25, False, False, {}), WON], "opening": "c"}
    lines = {"q/0/turn0": "x.", "q/0/turn1": "w.", "q/1/turn0": "x.", "q/1/turn1": "wy."}
    interface = settings(generation=GenerationConfig(n=2, max_new_tokens=8), reward=functions, dense=dense)
    interface.open()
    out = hold(interface, Scripted(lines), batch({"q": row}))
    interface.close()
    keys = interface.keys("generate")
    assert out.keys == keys.writes | keys.reports | {*INDEX_KEYS}
    assert out["rewards/environment"].tolist() == [1.25, 1.25]
    assert out["rewards/text"].tolist() == [4.0, 5.0]  # turns and observations: "x7\nw" and "x7\nwy"
    assert out["rewards/alone"].tolist() == [1.0, 1.0]
    assert total_rewards(out).tolist() == [1.25 + 2 + 1, 1.25 + 2.5 + 1]
    assert ("dense_rewards" in out) is dense


def test_a_conversation_is_trained_over_the_tokens_that_its_turns_were_drawn_from():
    engine = tiny_engine(optimizer=OptimizerSpec(lr=1e-2))
    generation = GenerationConfig(n=2, max_new_tokens=8, top_k=5, sampling_replay=True)
    script = [("7 and 8", 0.0, False, False, {}), ("no", 0.0, False, False, {}), WON]
    out = hold(settings(generation=generation), engine, batch({"q": {"script": script}}))
    assert out.keys == {*settings(generation=generation).keys("generate").writes, *INDEX_KEYS}
    sampled_T = out["loss_mask"]
    counts_T = torch.cat([mask.counts_N for mask in masks_of(out)])
    assert counts_T.tolist() == [5 if x else 0 for x in sampled_T.tolist()]
    scored = engine.forward(out, MicroBatchSpec(), lambda output, mb: mb.with_tokens(rescored=output.logprobs()))
    torch.testing.assert_close(scored["rescored"][sampled_T], out["logprobs"][sampled_T], atol=1e-5, rtol=1e-4)


@dataclass
class Boards(Prompts):
    """Prompts whose rows have a board; as in a file, all samples of a row share one object."""

    def __post_init__(self):
        self.rows = [{"board": [0]} for _ in range(self.n)]

    def sample(self, rows):
        return super().sample(rows).with_metadata(row=[self.rows[row] for _, row in rows])


def test_a_run_whose_episodes_change_their_rows_is_the_same_after_a_resume(tmp_path):
    def play(name: str, steps: int, **changes):
        turns = GenerationConfig(n=2, max_new_tokens=3, fixed_length=True)
        agent = EnvironmentInterface(f"{FIXTURES}:Board", generation=turns)
        interfaces = {"actor": GRPOActorInterface(generation=turns), "agent": agent}
        models = {"actor": BigramModel(), "agent": SharedModel("actor")}
        settings = {"interfaces": interfaces, "data": Boards(4), "batch_prompts": 4, "evaluation": None}
        settings |= {"models": models}
        settings |= {"checkpoint": CheckpointSpec(every_steps=1), "output_dir": tmp_path / name, "steps": steps}
        return run(toy_experiment(tmp_path, **settings, **changes)).series("reward")

    whole = play("whole", 4)
    assert whole == [2.0 + 3.0] * 4
    play("parts", 2)
    assert play("parts", 4, resume="auto") == whole


def test_three_turns_get_the_discounted_rewards_from_them_on_less_those_of_the_other_episode():
    """Rewards 0, 0, 1 and 0, 1, 0, gamma 1/2: returns 1/4, 1/2, 1 and 1/2, 1, 0, whose means are 3/8, 3/4 and 1/2."""
    rewards = {"a": (0.0, 0.0, 1.0), "b": (0.0, 1.0, 0.0)}
    played = []
    for name, turns in rewards.items():
        script = [("x", reward, k == 2, False, {}) for k, reward in enumerate(turns)]
        engine = Scripted({f"{name}/0/turn{k}": said for k, said in enumerate(["x.", "yz", "w."])})
        played.append(hold(settings(), engine, batch({name: {"script": script}})))
    a, b = played
    assert lists(a, "turn_index") == [[-1, -1, 0, 0, -1, 1, 1, -1, 2, 2]]
    assert lists(a, "turn_rewards") == [[0, 0, 0, 0, 0, 0, 0, 0, 0, 1.0]]
    assert lists(b, "turn_rewards") == [[0, 0, 0, 0, 0, 0, 1.0, 0, 0, 0]]
    assert a["rewards"].tolist() == b["rewards"].tolist() == [1.0]  # so group_relative would give no advantage
    keys = ("input_ids", "loss_mask", "turn_index", "turn_rewards", "logprobs")
    data = SequenceSample.from_sequences(
        ["q"], {key: [[out.sequences(key)[0] for out in played]] for key in keys}
    ).with_sequences(rewards=torch.ones(2), episode=torch.tensor([0, 1]), response_index=torch.tensor([0, 1]))
    centered = Normalization("group", "none")
    actor = GRPOActorInterface(advantage=TurnReturns(gamma=0.5), adv_norm=centered)
    credited = actor.with_advantages(Model("actor", BigramEngine()), data)
    first = [0, 0, -1 / 8, -1 / 8, 0, -1 / 4, -1 / 4, 0, 1 / 2, 1 / 2]
    assert lists(credited, "advantages") == [first, [-x for x in first]]
    graph = dataflow({"actor": actor, "agent": settings()})
    assert {"turn_index", "turn_rewards"} <= {
        key for rpc in graph.rpcs if rpc.name == "actor_train" for key in rpc.inputs
    }
