"""Sampling with servers, also in several ranks: contract, failures, and weights that cannot be mixed up."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from realign.api import GenerationConfig, MicroBatchSpec, Request, SequenceSample
from realign.api.sampling_mask import masks_of
from realign.engines import OptimizerSpec, TransformersModel
from realign.engines.distributed.sharded_network import GatheredCopy
from realign.errors import ConfigError, TransientError
from realign.models import Lora
from realign.ranks import current
from realign.runtime.models import open_sampler
from realign.samplers.servers import pool
from realign.samplers.servers.protocol import Ask, Unavailable, check_part
from realign.samplers.servers.server_settings import Updates
from realign.samplers.servers.vllm import Vllm
from realign.samplers.servers.worker.realign_worker import WeightReceiver
from realign.testing import SAMPLER_CHECKS, check_sampler
from tests.engines.distributed.run_ranks import run_ranks
from tests.processes import until
from tests.samplers.servers import fake_server
from tests.samplers.servers.fake_server import (
    KINDS,
    Adapted,
    FakeServer,
    Scoring,
    Table,
    logits_from,
    prompts,
    random_table,
)
from tests.tiny import VOCAB, random_sample, save_tiny

SAMPLE = {"vllm": "/v1/completions", "sglang": "/generate"}

HEALTH = {"vllm": "/health", "sglang": "/model_info"}

LOAD = {"vllm": "/collective_rpc", "sglang": "/update_weights_from_disk"}

START, NEW = random_table(0), random_table(1)

CONFIG = GenerationConfig(n=3, max_new_tokens=12)


@pytest.fixture(params=sorted(KINDS))
def kind(request):
    return request.param


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    """Make the pauses after failures, and the wait for requests of a stopped server, ten times shorter."""
    monkeypatch.setattr(pool, "_FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(pool, "_DRAIN_S", 0.3)


@pytest.fixture
def opened():
    """Close servers and samplers at the end of a test."""
    running = []
    yield running
    for one in reversed(running):
        one.close()


@pytest.fixture
def servers(kind, opened):
    def start(count=1, **options):
        started = [FakeServer(kind, START, **options) for _ in range(count)]
        opened.extend(started)
        return started

    return start


@pytest.fixture
def connect(kind, opened):
    def connect(servers, **settings):
        spec = KINDS[kind](urls=[server.url for server in servers], **settings)
        spec.check("models.actor.sampler")
        sampler = spec.open("actor", START, None)
        opened.append(sampler)
        return sampler

    return connect


def request(number=0, **changes):
    settings = {"max_new_tokens": 40, "fixed_length": True} | changes
    return Request(f"p{number}", 0, torch.tensor([1, 2]), GenerationConfig(**settings), 3)


def expected_logprobs(table, ids, first, temperature=1.0):
    """Log-probs of tokens that follow token `first`."""
    before = torch.tensor([first, *ids[:-1]])
    return (table.logits_VV / temperature).log_softmax(-1)[before, torch.tensor(ids)]


@pytest.mark.parametrize("check", sorted(SAMPLER_CHECKS))
def test_the_contract_of_samplers_holds(kind, opened, check):
    def make():
        server = FakeServer(kind, START)
        opened.append(server)
        return KINDS[kind](urls=[server.url]).open("actor", START, None)

    check_sampler(make, prompts(), CONFIG, NEW, only=check)


def test_an_update_midway_continues_responses_with_exact_versions(servers, connect):
    (server,) = servers(token_s=0.02)
    sampler = connect([server])
    handles = [sampler.submit(request(i)) for i in range(6)]
    until(lambda: sum(server.tokens_by_label.values()) >= 30)
    sampler.update(NEW, 5)
    for handle in handles:
        done = handle.result(30)
        versions, ids = done.versions.tolist(), done.ids.tolist()
        assert len(ids) == 40
        assert set(versions) == {0, 5}
        assert versions == sorted(versions)
        cut = versions.index(5)
        expected = torch.cat([expected_logprobs(START, ids[:cut], 2), expected_logprobs(NEW, ids[cut:], ids[cut - 1])])
        torch.testing.assert_close(done.logprobs, expected)


def test_an_update_does_not_wait_for_requests_that_reach_a_stopped_server(servers, connect, kind):
    """A server answers them only when it continues, and it continues only when the update has ended."""
    (server,) = servers()
    sampler = connect([server])
    server.faults[SAMPLE[kind]] = [fake_server.late] * 4
    handles = [sampler.submit(request(i)) for i in range(4)]
    until(lambda: not server.faults[SAMPLE[kind]])
    sampler.update(NEW, 1)
    for handle in handles:
        done = handle.result(30)
        assert set(done.versions.tolist()) == {1}
        torch.testing.assert_close(done.logprobs, expected_logprobs(NEW, done.ids.tolist(), 2))


def test_responses_with_stop_strings_start_again_after_an_update(servers, connect):
    """A stop string that begins before an update could not be found after it."""
    (server,) = servers(token_s=0.02)
    sampler = connect([server])
    handle = sampler.submit(request(fixed_length=False, stop_token_ids=[], stop_strings=["end"]))
    until(lambda: sum(server.tokens_by_label.values()) >= 5)
    sampler.update(NEW, 1)
    done = handle.result(30)
    assert set(done.versions.tolist()) == {1}
    assert done.truncated
    torch.testing.assert_close(done.logprobs, expected_logprobs(NEW, done.ids.tolist(), 2))


def test_every_response_has_its_own_seed(servers, connect):
    (server,) = servers()
    sampler = connect([server])
    sampler.generate(prompts(), CONFIG, seed=1)
    sent = [body.get("seed", body.get("sampling_params", {}).get("sampling_seed")) for path, body in server.requests]
    seeds = [seed for seed in sent if seed is not None]
    assert len(set(seeds)) == len(seeds) == 12
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_server_that_dies_costs_its_requests_only(servers, connect):
    pair = servers(2, token_s=0.01)
    sampler = connect(pair)
    handles = [sampler.submit(request(i)) for i in range(10)]
    until(lambda: all(sum(server.tokens_by_label.values()) >= 20 for server in pair))
    pair[0].close()
    for handle in handles:
        done = handle.result(30)
        torch.testing.assert_close(done.logprobs, expected_logprobs(START, done.ids.tolist(), 2))


def test_a_server_that_restarts_gets_the_weights_before_it_is_used(servers, connect):
    """Tokens that it sampled with the weights of its start are discarded."""
    (server,) = servers(token_s=0.01)
    sampler = connect([server])
    sampler.update(NEW, 1)
    handles = [sampler.submit(request(i)) for i in range(4)]
    until(lambda: len(server.jobs) == 4)
    server.restart()
    for handle in handles:
        done = handle.result(30)
        assert set(done.versions.tolist()) == {1}
        torch.testing.assert_close(done.logprobs, expected_logprobs(NEW, done.ids.tolist(), 2))
    server.restart()  # while it is idle
    done = sampler.submit(request(9)).result(30)
    torch.testing.assert_close(done.logprobs, expected_logprobs(NEW, done.ids.tolist(), 2))


@pytest.mark.parametrize(
    "fault", ["disconnect", "500", "429", "no answer", "aborted", "endless", "compressed", "trickle"]
)
def test_requests_are_retried_after_faults(servers, connect, kind, fault):
    (server,) = servers()
    sampler = connect([server], request_timeout_s=1 if fault == "trickle" else 30)
    faults = {
        "disconnect": fake_server.disconnect,
        "500": fake_server.status(500),
        "429": fake_server.status(429),
        "no answer": fake_server.body({}),
        "aborted": fake_server.body(fake_server.sampled(kind, [1], [-1.0], "abort")),
        "endless": fake_server.endless,
        "compressed": fake_server.compressed,
        "trickle": fake_server.trickle,
    }
    server.faults[SAMPLE[kind]] = [faults[fault]]
    done = sampler.submit(request()).result(30)
    torch.testing.assert_close(done.logprobs, expected_logprobs(START, done.ids.tolist(), 2))
    assert server.faults[SAMPLE[kind]] == []


@pytest.mark.parametrize("kind", ["sglang"])
def test_sampling_masks_of_responses_that_an_update_interrupts_are_joined(servers, connect):
    (server,) = servers(token_s=0.01)
    sampler = connect([server])
    config = GenerationConfig(n=2, max_new_tokens=30, fixed_length=True, top_k=4, temperature=0.7, sampling_replay=True)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(sampler.generate, prompts(), config, seed=1)
        until(lambda: server.jobs and all(len(job.ids) > 5 for job in server.jobs))
        sampler.update(NEW, 1)
        out = call.result()
    assert set(out["versions"].tolist()) == {-1, 0, 1}
    columns = (out.sequences(key) for key in ("input_ids", "loss_mask", "logprobs", "versions"))
    for ids, mask, logprobs, versions, sets in zip(*columns, masks_of(out), strict=True):
        assert sets.counts_N.tolist() == [4 if sampled else 0 for sampled in mask.tolist()]
        kept = sets.ids_K.view(-1, 4)
        for n, t in enumerate(mask.nonzero()[:, 0].tolist()):
            table = (START, NEW)[int(versions[t])]
            row_K = (table.logits_VV[int(ids[t - 1])] / 0.7)[kept[n].long()].log_softmax(-1)
            assert float(logprobs[t]) == pytest.approx(float(row_K[kept[n].tolist().index(int(ids[t]))]), abs=1e-5)


@pytest.mark.parametrize("kind", ["sglang"])
def test_servers_return_sampling_masks_only_with_top_k(servers, connect):
    with pytest.raises(ConfigError, match=r"generation\.top_p=0\.9: .* Set generation\.top_k"):
        connect(servers()).submit(request(top_p=0.9, sampling_replay=True))


@pytest.mark.parametrize(
    ("kept", "message"),
    [([[1, 2]], "no sampling mask for each of its 2"), ([[1], 2], "no list"), ([[1], [3]], "the token 2, but not in")],
)
def test_impossible_sampling_masks_are_refused(kept, message):
    ask = replace(ASK, config=replace(ASK.config, top_k=2, sampling_replay=True))
    with pytest.raises(Unavailable, match=message):
        check_part([1, 2], [-1.0, -1.0], "stop", ask, kept=kept)
    assert check_part([1, 2], [-1.0, -1.0], "stop", ask, kept=[[1, 5], [2, 4]]).kept == [[1, 5], [2, 4]]


ASK = Ask([1, 2], GenerationConfig(max_new_tokens=4), stop_ids=(0, 9), seed=1, words=12)


@pytest.mark.parametrize(
    ("ids", "logprobs", "reason", "message"),
    [
        ([1], [-1e300], "stop", r"the log-prob -1e\+300, which"),
        ([1], [-20_000], "stop", "the log-prob -20000, which"),
        ([1], [-(10**400)], "stop", "the log-prob -1000000"),
        ([1], [-math.inf], "stop", "the log-prob -inf, which"),
        ([1], [False], "stop", "the log-prob False, which"),
        ([12], [-1.0], "stop", "the token id 12, but the last valid one is 11"),
        ([10**70], [-1.0], "stop", "the token id 1000000"),
        ([True], [-1.0], "stop", "the token id True"),
        (["x"], [-1.0], "stop", "the token id 'x'"),
        ([1], [math.nan], "stop", "the log-prob nan, which"),
        ([1] * 99, [-1.0] * 99, "stop", "99 tokens, of at most 4"),
        ([1], [-1.0], "error", "the answer ended for an unknown reason: 'error'"),
        ([1, 0, 2], [-1.0] * 3, "length", "the answer continues after the end token 0"),
        ([9, 9], [-1.0] * 2, "stop", "the answer continues after the end token 9"),
        ([1], [-1.0], ["stop"], r"the answer ended for an unknown reason: \['stop'\]"),
        ({}, [], "stop", "the answer has no equal lists"),
        ([1], [-1.0] * 2, "stop", "the answer has no equal lists"),
    ],
)
def test_impossible_answers_are_refused_with_their_reason(ids, logprobs, reason, message):
    with pytest.raises(Unavailable, match=message):
        check_part(ids, logprobs, reason, ASK)


def always(kind, status, answer):
    """Return a change of all sampled answers."""
    return lambda path, body, reply: (status, answer) if path == SAMPLE[kind] else reply


@pytest.mark.parametrize("fault", ["status 500", "log-prob nan", "99 tokens, of at most 40"])
def test_servers_that_fail_each_request_end_the_run_when_patience_is_over(servers, connect, kind, fault):
    """They answer all other calls, so they get the weights and are used again, but less and less often."""
    pair = servers(2)
    sampler = connect(pair, patience_s=0.2)
    wrong = {"log-prob nan": ([1], [math.nan]), "99 tokens, of at most 40": ([1] * 99, [-1.0] * 99)}
    for server in pair:
        if fault == "status 500":
            server.tamper = always(kind, 500, {"error": "broken"})
        else:
            server.tamper = always(kind, 200, fake_server.sampled(kind, *wrong[fault], "stop"))
    handle = sampler.submit(request())
    with pytest.raises(TransientError, match=rf"no server completed a request for .* \(patience_s=0.2; .*{fault}"):
        handle.result(30)
    assert all(len(paths(server, LOAD[kind])) <= 6 for server in pair)


def test_a_request_that_fails_alone_is_given_up_alone(servers, connect, kind):
    (server,) = servers()
    sampler = connect([server])

    def poison(path, body, reply):
        return (500, {"error": "poison"}) if 7 in body.get("prompt", body.get("input_ids", ())) else reply

    server.tamper = poison
    prompt = Request("bad", 0, torch.tensor([1, 7]), GenerationConfig(max_new_tokens=4), 3)
    handle = sampler.submit(prompt)
    number = 0
    while not handle.done:
        assert len(sampler.submit(request(number)).result(30).ids) == 40
        number += 1
    with pytest.raises(TransientError, match=r"a request for prompt 'bad' failed \d+ times, .*poison"):
        handle.result(0)
    assert len(sampler.submit(request()).result(30).ids) == 40


def test_a_server_that_hangs_during_an_update_is_taken_out_of_use(servers, connect, kind):
    pair = servers(2)
    sampler = connect(pair, update_timeout_s=3)
    pair[0].faults[LOAD[kind]] = [fake_server.hang]
    sampler.update(NEW, 1)
    done = sampler.generate(prompts(), CONFIG, seed=2)
    assert set(done["versions"].tolist()) == {-1, 1}


def test_without_any_server_the_run_ends_with_a_transient_error(servers, connect):
    (server,) = servers(token_s=0.01)
    sampler = connect([server], patience_s=1)
    handle = sampler.submit(request())
    server.close()
    with pytest.raises(TransientError, match=r"models.actor.sampler: no server worked for 1 seconds"):
        handle.result(30)
    sampler.update(NEW, 1)  # the step that trained these weights is complete
    with pytest.raises(TransientError, match="no server worked"):
        sampler.submit(request())


BASE = random_table(20).logits_VV


def adapted(seed):
    return Adapted(BASE, random_table(seed).logits_VV)


@pytest.fixture
def connect_adapter(kind, opened):
    def connect(servers, **settings):
        spec = KINDS[kind](urls=[server.url for server in servers], lora="adapter", **settings)
        sampler = spec.open("actor", adapted(21), None)
        opened.append(sampler)
        return sampler

    return connect


def paths(server, part):
    return [path for path, body in server.requests if part in path]


def test_a_lora_adapter_is_sent_alone_and_selected_by_name(servers, connect_adapter, kind, tmp_path):
    """The base model is loaded once; an update sends the adapter, and removes the one before."""
    (server,) = servers()
    sampler = connect_adapter([server], weights_dir=str(tmp_path))
    for version in (1, 2, 3):
        sampler.update(adapted(30 + version), version)
        done = sampler.submit(request(version)).result(30)
        torch.testing.assert_close(done.logprobs, expected_logprobs(adapted(30 + version), done.ids.tolist(), 2))
        assert set(done.versions.tolist()) == {version}
    assert len(paths(server, LOAD[kind])) == 1
    assert torch.equal(server.logits_VV, BASE)
    assert list(server.adapters) == [server.label]
    (root,) = tmp_path.iterdir()
    assert {folder.name for folder in root.iterdir()} == {"base", "update_3"}


def test_a_server_that_lost_its_adapter_gets_base_model_and_adapter_again(servers, connect_adapter, kind):
    (server,) = servers(token_s=0.01)
    sampler = connect_adapter([server])
    sampler.update(adapted(22), 1)
    handles = [sampler.submit(request(i)) for i in range(3)]
    until(lambda: len(server.jobs) == 3)
    server.restart()  # with requests
    for handle in handles:
        done = handle.result(30)
        torch.testing.assert_close(done.logprobs, expected_logprobs(adapted(22), done.ids.tolist(), 2))
    server.restart()  # idle: it rejects the name of the adapter
    done = sampler.submit(request(9)).result(30)
    torch.testing.assert_close(done.logprobs, expected_logprobs(adapted(22), done.ids.tolist(), 2))
    assert len(paths(server, LOAD[kind])) == 3


@pytest.mark.parametrize("lora", ["merged", "adapter"])
@pytest.mark.parametrize("level", [1, 2])
def test_servers_free_their_memory_while_the_role_sleeps(servers, kind, opened, lora, level):
    (server,) = servers(token_s=0.01)
    spec = KINDS[kind](urls=[server.url], lora=lora, sleep_level=level)
    sampler = spec.open("actor", adapted(21), None)
    opened.append(sampler)
    handle = sampler.submit(request())
    until(lambda: sum(server.tokens_by_label.values()) >= 5)
    sampler.sleep()
    assert server.asleep
    sampler.sleep()
    assert server.sleeps == 1
    sampler.wake()
    done = handle.result(30)  # the weights are the same, also if the server did not keep them
    torch.testing.assert_close(done.logprobs, expected_logprobs(adapted(21), done.ids.tolist(), 2))
    sampler.sleep()
    loads = len(server.requests)
    sampler.update(adapted(22), 1)
    assert len([path for path, body in server.requests[loads:] if path != HEALTH[kind]]) == 0
    sampler.wake()
    done = sampler.submit(request(1)).result(30)
    assert set(done.versions.tolist()) == {1}
    torch.testing.assert_close(done.logprobs, expected_logprobs(adapted(22), done.ids.tolist(), 2))


@pytest.mark.parametrize("fault", [False, True])
def test_a_server_allocates_its_cache_after_it_has_loaded_the_weights(servers, kind, opened, fault):
    """Weights and cache together leave no memory for loading."""
    (server,) = servers()
    sampler = KINDS[kind](urls=[server.url], sleep_level=2).open("actor", START, None)
    opened.append(sampler)
    sampler.sleep()
    sampler.update(NEW, 1)
    if fault:
        server.faults[LOAD[kind]] = [fake_server.status(500)]
    first, asleep = len(server.exchanges), []
    server.tamper = lambda path, body, reply: asleep.append((path, server.asleep)) or reply
    sampler.wake()
    done = sampler.submit(request()).result(30)
    torch.testing.assert_close(done.logprobs, expected_logprobs(NEW, done.ids.tolist(), 2))
    (loaded,) = [memory for path, memory in asleep if path == LOAD[kind]]
    assert loaded == fake_server.MEMORY[kind] - {"weights"}
    wakes = [e for e in server.exchanges[first:] if e.path in ("/wake_up", "/resume_memory_occupation")]
    tags = [e.body["tags"] if kind == "sglang" else [e.query["tags"]] for e in wakes]
    assert tags == [["weights"], ["kv_cache", "cuda_graph"] if kind == "sglang" else ["kv_cache"]]
    assert not server.asleep


def test_a_server_that_restarts_while_it_sleeps_is_given_the_weights(servers, kind, opened):
    (server,) = servers()
    sampler = KINDS[kind](urls=[server.url], sleep_level=2).open("actor", START, None)
    opened.append(sampler)
    sampler.sleep()
    server.restart()
    sampler.wake()
    done = sampler.submit(request()).result(30)
    torch.testing.assert_close(done.logprobs, expected_logprobs(START, done.ids.tolist(), 2))


@pytest.fixture
def connect_deltas(opened):
    """Connect a server of vLLM that takes deltas, and return it and the sampler."""

    def connect(receives=True, **settings):
        server = FakeServer("vllm", START)
        opened.append(server)
        server.dtype = "torch.bfloat16"
        if receives:
            server.add_receiver()
        spec = Vllm(urls=[server.url], updates=Updates.delta, probe_tolerance=None, **settings)
        opened.append(spec.open("actor", START, None))
        return server, opened[-1]

    return connect


def loads(server):
    """Return the methods by which a server got weights since the last call."""
    methods = [body["method"] for path, body in server.requests if path == "/collective_rpc"]
    server.requests.clear()
    return methods


def few_changes(number):
    """Return weights that differ from `START` in some elements."""
    logits_VV = START.logits_VV.clone()
    logits_VV[number, :3] += 0.5
    return Table(logits_VV)


FULL, DELTA = ["realign_receive", "realign_load"], ["realign_change", "realign_load"]


def test_servers_get_only_what_changed_in_their_dtype(connect_deltas):
    server, sampler = connect_deltas()
    assert loads(server) == FULL
    sampler.update(few_changes(1), 1)  # now in bfloat16
    assert loads(server) == FULL
    for number in (2, 3):
        sampler.update(few_changes(number), number)
        assert loads(server) == DELTA
        assert torch.equal(server.logits_VV, few_changes(number).logits_VV.bfloat16().float())


def restart(server):
    server.restart()


def miss_an_update(server):
    """Lose an update, as a server that was out of use."""
    server.receiver.realign_change = lambda folder, base: WeightReceiver.realign_change(server.receiver, folder, "?")


def damage_the_copy(server):
    server.receiver._realign_copy.weights["logits"][3, 3] += 1


def break_the_request(server):
    server.faults["/collective_rpc"] = [fake_server.status(500)]


@pytest.mark.parametrize("fault", [restart, miss_an_update, damage_the_copy, break_the_request])
def test_a_server_without_the_previous_weights_gets_all_of_them(connect_deltas, fault):
    server, sampler = connect_deltas()
    sampler.update(few_changes(1), 1)
    loads(server)
    fault(server)
    sampler.update(few_changes(2), 2)
    until(lambda: server.label.endswith("-2"))
    methods = loads(server)
    assert methods[-2:] == FULL
    assert torch.equal(server.logits_VV, few_changes(2).logits_VV.bfloat16().float())
    sampler.update(few_changes(3), 3)
    assert torch.equal(server.logits_VV, few_changes(3).logits_VV.bfloat16().float())


def test_a_server_that_never_confirms_the_checksum_is_not_used(connect_deltas):
    server, sampler = connect_deltas(patience_s=2.0)

    def tamper(path, body, answer):
        if path == "/collective_rpc" and body["method"] != "realign_load":
            return 200, {"results": [{"digest": "0" * 64, "paths": []}]}
        return answer

    server.tamper = tamper
    sampler.update(few_changes(1), 1)
    with pytest.raises(TransientError, match=r"no server worked .*its weights have the checksum 000"):
        sampler.submit(request())


def test_a_folder_of_another_machine_gets_deltas_and_all_weights_only_for_a_server_without_them(
    connect_deltas, tmp_path
):
    server, sampler = connect_deltas(weights_dir=str(tmp_path))
    (root,) = tmp_path.iterdir()
    for number in (1, 2, 3):
        sampler.update(few_changes(number), number)
    assert [path.name for path in root.iterdir()] == ["update_3_delta"]
    server.restart()
    sampler.update(few_changes(4), 4)
    assert {path.name for path in root.iterdir()} == {"update_4", "update_4_delta"}
    assert torch.equal(server.logits_VV, few_changes(4).logits_VV.bfloat16().float())
    sampler.close()
    assert not list(tmp_path.iterdir())


def test_a_server_without_the_receiver_gets_all_weights(connect_deltas):
    server, sampler = connect_deltas(receives=False)
    for number in (1, 2):
        sampler.update(few_changes(number), number)
    assert loads(server) == ["reload_weights"] * 3
    assert torch.equal(server.logits_VV, few_changes(2).logits_VV.bfloat16())


def test_a_server_of_the_run_starts_with_the_receiver(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/of/the/run")
    spec = Vllm(updates=Updates.delta, arguments="--dtype bfloat16")
    assert " ".join(spec.command_line("", Path("m"), 1)).count("--worker-extension-cls realign_worker.WeightRec") == 1
    folder, *others = spec.server_variables(0)["PYTHONPATH"].split(":")
    assert (Path(folder) / "realign_worker.py").exists()
    assert others == ["/of/the/run"]
    assert spec.launch_dtype() == "bfloat16"
    assert "PYTHONPATH" not in Vllm().server_variables(0)
    assert Vllm(arguments="--dtype=half").launch_dtype() == "half"
    assert Vllm().launch_dtype() is None


@pytest.mark.parametrize(
    ("keys", "sent"), [("other.example=wrong, 127.0.0.1=secret", "Bearer secret"), ("other.example=wrong", None)]
)
def test_an_api_key_is_sent_to_its_host_only(servers, connect, kind, monkeypatch, keys, sent):
    monkeypatch.setenv("REALIGN_SERVER_KEYS", keys)
    (server,) = servers()
    seen = []

    def record(handler):
        seen.append(handler.headers["Authorization"])
        fake_server.send(handler, 200, None)

    server.faults[HEALTH[kind]] = [record]
    connect([server])
    assert seen == [sent]


WORDS = VOCAB


def three_prompts():
    return SequenceSample.from_sequences(["a", "b", "c"], {"prompt_ids": [[[1, 2]], [[3]], [[4, 5, 6]]]})


def loss(output, data):
    return -output.logprobs(temperature=1.0, where_T=data["loss_mask"]).sum(), {}


def train_and_sample(folder: Path, url: str, settings: dict):
    """Sample, train a step, and sample again."""
    lora = {"trains": Lora(rank=2, alpha=4)} if settings.get("lora") == "adapter" else {}
    sampler = Vllm(urls=[url], weights_dir=str(folder / "weights"), probe_tolerance=None, **settings)
    step = OptimizerSpec(lr=0.1)
    spec = TransformersModel(str(folder / "llama"), device="cpu", optimizer=step, sampler=sampler, **lora)
    model = spec.load("actor", seed=0)
    # Adapters are gathered, and nothing else.
    refused = patch.object(GatheredCopy, "fill", side_effect=AssertionError("a rank gathers the model"))
    config = GenerationConfig(n=2, max_new_tokens=7)
    with nullcontext() if lora else refused, ExitStack() as stack:
        open_sampler(spec, model)
        stack.callback(model.sampler.close)
        samples = [model.sampler.generate(three_prompts(), config, seed=1)]
        data = random_sample([(6,), (4, 3)])
        model.engine.train_batch(data, MicroBatchSpec(100), loss, lambda part: part["loss_mask"].sum())
        model.sampler.sleep()
        model.publish_weights()
        model.sampler.wake()
        samples.append(model.sampler.generate(three_prompts(), config, seed=2))
        weights = {name: x.clone() for name, x in model.engine.weights().items()}
    return current().rank, [dict(sample.data) for sample in samples], weights, model.sampler.version


@pytest.mark.parametrize(
    "settings",
    [{}, pytest.param({"lora": "adapter", "sleep_level": 2}, marks=pytest.mark.slow)],
    ids=["merged", "adapter"],
)
def test_all_ranks_get_the_responses_of_the_servers_of_rank_0(tmp_path, settings):
    save_tiny(tmp_path / "llama", family="llama", vocab_size=WORDS)
    server = FakeServer("vllm", random_table(0, words=WORDS))
    try:
        (first, *others) = run_ranks(2, train_and_sample, tmp_path, server.url, settings)
    finally:
        server.close()
    assert [first[0], *(rank for rank, *_ in others)] == [0, 1]
    for _, samples, _, version in others:
        assert version == first[3] == 1
        for mine, its in zip(first[1], samples, strict=True):
            assert mine.keys() == its.keys()
            assert all(torch.equal(mine[key], its[key]) for key in mine)
    assert [set(sample["versions"].tolist()) for sample in first[1]] == [{-1, 0}, {-1, 1}]
    if not settings.get("lora"):
        torch.testing.assert_close(server.logits_VV, logits_from(first[2]))
    else:
        assert list(server.adapters) == [server.label]
    assert len([path for path, body in server.requests if path == "/v1/completions"]) == 12


def test_weights_without_space_end_the_run_at_the_next_call_that_samples(servers, connect):
    (server,) = servers()
    sampler = connect([server])
    sampler.update(Full(NEW.logits_VV), 1)  # the step that trained these weights is complete
    with pytest.raises(TransientError, match=r"models.actor.sampler: .*No space left on device. Set weights_dir"):
        sampler.submit(request())


class Full(Scoring):
    def save(self, path):
        raise OSError(28, "No space left on device")
