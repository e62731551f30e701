"""Test the details of a run: tokens, spans, warnings, the load of the machine, and run.json."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from realign.api import GenerationConfig
from realign.api.callback import Callback
from realign.api.stats import TracedSequence
from realign.engines import TransformersModel
from realign.engines.training.optimizer import OptimizerSpec
from realign.errors import RunError
from realign.interfaces.components import GroupRelative, Normalization, Truncation
from realign.interfaces.grpo import GRPOActorInterface
from realign.records.metrics.details import pieces, token_records
from realign.run_settings import RecordSpec
from realign.runtime import Async, CheckpointSpec, DynamicSampling, run
from realign.runtime.run_report import attempts_in
from realign.testing import random_batch
from tests.tiny import save_tiny
from tests.toys import BigramModel, CountToken, experiment


def decode(ids, skip_special_tokens=True):
    return " ".join(str(int(i)) for i in ids)


def test_a_record_has_the_values_of_the_batch_and_of_the_loss_at_each_token():
    batch = random_batch()
    length = len(batch.sequences("input_ids")[0])
    traces = [
        TracedSequence(batch.ids[0], 0, {"token/ratio": torch.zeros(length), "token/mask": torch.ones(length)}),
        TracedSequence(batch.ids[0], 0, {"token/ratio": torch.full((length,), 1.25)}),  # the last pass counts
    ]
    first = token_records(batch, traces, RecordSpec(), decode)[0]
    ids, given = batch.sequences("input_ids")[0], batch.sequences("prompt_mask")[0]
    assert first["tokens"] == ids.tolist()
    assert first["given"] == given.int().tolist()
    assert first["mask"] == batch.sequences("loss_mask")[0].int().tolist()
    logprobs, reference = (batch.sequences(key)[0] for key in ("logprobs", "ref_logprobs"))
    for t in range(length):
        if given[t]:
            assert first["logprobs"][t] is first["ratio"][t] is first["kl"][t] is None
        else:
            assert first["logprobs"][t] == pytest.approx(float(logprobs[t]), rel=1e-5)
            assert first["kl"][t] == pytest.approx(float(logprobs[t] - reference[t]), abs=1e-5)
            assert first["ratio"][t] == 1.25
    json.dumps(first, allow_nan=False)


def test_the_numbers_of_prompts_responses_and_tokens_are_limited():
    batch = random_batch()
    records = token_records(batch, (), RecordSpec(token_prompts=2, token_responses=1, token_limit=3), decode)
    assert [one["id"] for one in records] == list(batch.ids[:2])
    assert all(len(one["tokens"]) == len(one["logprobs"]) == min(3, one["length"]) for one in records)
    assert token_records(batch, (), RecordSpec(token_prompts=0), decode) == []
    assert token_records(batch.select(["input_ids"]), (), RecordSpec(), decode) == []


def test_a_character_of_several_tokens_belongs_to_its_first_token():
    data = "a é€b".encode()

    def of_bytes(ids, skip_special_tokens=True):
        return bytes(ids).decode(errors="replace")

    texts = pieces(list(data), of_bytes)
    assert texts == ["a", " ", "é", "", "€", "", "", "b"]
    assert "".join(pieces([0xFF, 0x61], of_bytes)) == "\ufffda"


EVERY = RecordSpec(every_steps=1, token_prompts=2, token_responses=2)
CHECKPOINTS = CheckpointSpec(every_steps=1, keep=9)


def lines(out: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]


def test_the_first_step_and_every_nth_one_are_recorded(tmp_path):
    out = run(experiment(tmp_path, steps=5, records=RecordSpec(every_steps=2))).output_dir
    assert list(dict.fromkeys(one["step"] for one in lines(out, "tokens"))) == [1, 2, 4]
    assert list(dict.fromkeys(one["step"] for one in lines(out, "spans"))) == [1, 2, 4]


def test_a_recorded_token_has_ratio_and_advantage_of_the_loss(tmp_path):
    out = run(experiment(tmp_path, records=EVERY)).output_dir
    record = lines(out, "tokens")[0]
    places = [i for i, trained in enumerate(record["mask"]) if trained]
    assert places
    for name in ("logprobs", "trainer_logprobs", "ratio", "entropy", "advantages", "versions"):
        assert all(record[name][i] is not None for i in places), name
    assert all(record["ratio"][i] == pytest.approx(1, abs=1e-4) for i in places)  # before the first update


@dataclass
class NoneInTheMiddle(CountToken):
    """Counts the tokens 3; the second response to every prompt has no reward."""

    def inference(self, model, data, mb_spec):
        rewards_S = super().inference(model, data, mb_spec)["rewards"]
        place_S = data["response_index"]
        return data.with_sequences(rewards=torch.where(place_S == 1, math.nan, rewards_S)).select(["rewards"])


FREE = GenerationConfig(n=6, max_new_tokens=6)
FILTERS = {
    "no reward": {"reward": NoneInTheMiddle()},
    "no reward, batch statistics": {"reward": NoneInTheMiddle(), "adv_norm": Normalization()},
    "truncated": {"truncation": Truncation(mask=True)},
    "short": {"min_response_tokens": 3},
    "not among the best": {"keep_best": 3},
    "group too small": {"reward": NoneInTheMiddle(), "advantage": GroupRelative(min_group_size=5)},
    "advantages of each mini-batch": {"reward": NoneInTheMiddle(), "credit_per_minibatch": True, "n_minibatches": 4},
    "dynamic sampling": {"reward": NoneInTheMiddle(), "dynamic_sampling": DynamicSampling()},
}


@pytest.mark.parametrize("name", FILTERS)
def test_the_tokens_and_the_trace_of_a_record_belong_to_one_response_whatever_is_left_out(tmp_path, name):
    settings = dict(FILTERS[name])
    outside = {key: settings.pop(key) for key in ("dynamic_sampling",) if key in settings}
    reward = settings.pop("reward", CountToken())
    actor = GRPOActorInterface(generation=FREE, **settings)
    records = RecordSpec(every_steps=1, token_prompts=8, token_responses=6)
    changes = {"interfaces": {"actor": actor, "reward": reward}, "records": records, "evaluation": None, **outside}
    out = run(experiment(tmp_path, steps=1, models={"actor": BigramModel(lr=1e-6)}, **changes)).output_dir
    token_rows = lines(out, "tokens")
    for one in token_rows:
        trained = [i for i, mask in enumerate(one["mask"]) if mask and "ratio" in one]
        # nothing was updated yet, so the trainer has the sampler's log-probs if the trace is that of these tokens
        assert [one["trainer_logprobs"][i] for i in trained] == pytest.approx([one["logprobs"][i] for i in trained])
    trains = {(one["id"], one["response"]) for one in token_rows if "ratio" in one}
    left_out = {(one["id"], one["response"]) for one in token_rows} - trains
    assert any((prompt, later) in trains for prompt, response in left_out for later in range(response + 1, 6))
    samples = {(one["id"], one["response_index"]): one["response"] for one in lines(out, "samples")}
    for one in token_rows:
        if (text := samples.get((one["id"], one["response"]))) is not None:
            given = one["given"].count(1)
            assert text == " ".join(map(str, one["tokens"][given:]))


def test_records_change_no_metric_of_the_training(tmp_path):
    def metrics(name: str, records: RecordSpec) -> list[dict]:
        done = run(experiment(tmp_path, output_dir=tmp_path / name, records=records))
        timed = ("_s", "seconds")
        return [{key: value for key, value in one.items() if not key.endswith(timed)} for one in done.history]

    off = RecordSpec(token_prompts=0, system_seconds=None)
    assert metrics("on", EVERY) == metrics("off", off)


def test_a_resumed_run_continues_its_records_without_duplicates(tmp_path):
    settings = {"checkpoint": CHECKPOINTS, "records": EVERY}
    whole = run(experiment(tmp_path, steps=4, output_dir=tmp_path / "whole", **settings)).output_dir
    out = run(experiment(tmp_path, steps=2, **settings)).output_dir
    with (out / "tokens.jsonl").open("a") as file:
        file.write('{"step": 3, "torn')
    run(experiment(tmp_path, steps=4, resume="auto", **settings))
    assert lines(out, "tokens") == lines(whole, "tokens")
    assert [one["name"] for one in lines(out, "spans") if one["step"] == 3] == [
        one["name"] for one in lines(whole, "spans") if one["step"] == 3
    ]
    first, second = attempts_in(out)
    assert (first["first_step"], first["last_step"], first["status"]) == (1, 2, "completed")
    assert (second["first_step"], second["last_step"], second["status"]) == (3, 4, "completed")


class Fails(Callback):
    def on_step(self, event):
        warnings.warn("the disk is warm", stacklevel=1)
        if event.step == 2:
            raise RunError("the disk is hot")


def test_a_failed_run_has_its_warnings_and_its_reason(tmp_path):
    with pytest.raises(RunError), pytest.warns(UserWarning, match="disk is warm"):
        run(experiment(tmp_path, records=EVERY, callbacks={"fails": Fails()}))
    out = tmp_path / "run"
    assert [one["message"] for one in lines(out, "warnings")].count("the disk is warm") == 2
    (attempt,) = attempts_in(out)
    assert (attempt["status"], attempt["reason"]) == ("failed", "the disk is hot")
    assert attempt["ended"] is not None


def test_asynchronous_calls_are_spans_of_their_threads(tmp_path):
    models = {"actor": TransformersModel(str(save_tiny(tmp_path / "policy")), optimizer=OptimizerSpec(lr=1e-3))}
    settings = {"evaluation": None, "checkpoint": None, "rollout": Async(max_staleness=1), "records": EVERY}
    with pytest.warns(UserWarning, match="max_staleness=1"):
        out = run(experiment(tmp_path, models=models, **settings)).output_dir
    threads = {one["thread"] for one in lines(out, "spans") if one["name"] == "actor_gen"}
    assert any(name.startswith("rollout") for name in threads)
    assert all(one["start"] <= one["end"] for one in lines(out, "spans"))
