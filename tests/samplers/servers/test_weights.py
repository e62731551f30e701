"""Model folders and deltas for servers."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from realign.api import MicroBatchSpec
from realign.engines import OptimizerSpec, TransformersModel
from realign.engines.distributed.sharding import Sharding
from realign.errors import RunError, TransientError
from realign.ranks import current
from realign.samplers.servers import weights
from realign.samplers.servers.weights import WeightFolders, untie
from realign.samplers.servers.worker.realign_worker import apply, bits, digest, map_folder
from tests.engines.distributed.run_ranks import run_ranks
from tests.processes import until
from tests.tiny import random_sample, save_tiny


def tied_model(folder, **save):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_key_value_heads=1, vocab_size=20, tie_word_embeddings=True))
    model.save_pretrained(folder, **save)
    return model


@pytest.mark.parametrize("save", [{}, {"max_shard_size": "1KB"}], ids=["one file", "shards"])
def test_an_untied_model_computes_the_same(tmp_path, save):
    model = tied_model(tmp_path, **save)
    untie(tmp_path)
    assert not json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"]
    untied = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight
    ids = torch.tensor([[1, 5, 7]])
    torch.testing.assert_close(untied(ids).logits, model(ids).logits)


def test_a_full_disk_is_a_transient_error(tmp_path):
    class Full:
        def save(self, path):
            raise OSError(28, "No space left on device")

    folders = WeightFolders(str(tmp_path))
    with pytest.raises(TransientError, match=r"No space left on device. Set weights_dir to a folder with more space"):
        folders.write(Full(), 0)


def test_missing_space_is_found_before_weights_are_written(tmp_path, monkeypatch):
    """A rank that writes to a mapped file on a full disk would be killed by SIGBUS."""
    engine = trained(tmp_path)
    folders = WeightFolders(str(tmp_path))
    folders.write(engine, 0)

    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TransientError, match=r"update_1: .*No space left on device"):
        folders.write(engine, 1)


HOLD = "import time; from realign.samplers.servers.weights import WeightFolders as W;"


def test_a_run_that_is_killed_leaves_no_weights(tmp_path):
    command = f"{HOLD} print(W({str(tmp_path)!r}).root, flush=True); time.sleep(600)"
    run = subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    root = Path(run.stdout.readline().strip())
    assert root.is_dir()
    run.kill()
    run.wait()
    until(lambda: not root.exists())


def loss(output, data):
    return -output.logprobs(temperature=1.0, where_T=data["loss_mask"]).sum(), {}


def trained(folder, *, lr=0.1, sharding=None, **config):
    """Load a tiny model as the engine of a policy."""
    if current().leader:
        save_tiny(folder / "llama", family="llama", **config)
    current().barrier()
    more = {"optimizer": OptimizerSpec(lr=lr), "sharding": sharding or Sharding()}
    spec = TransformersModel(str(folder / "llama"), device="cpu", **more)
    return spec.load("actor", seed=0).engine


def step(engine):
    engine.train_batch(random_sample([(6,), (4, 3)]), MicroBatchSpec(100), loss, lambda part: part["loss_mask"].sum())


def assert_sent(folder, engine):
    """Check the weights in a folder for servers that compute in bfloat16."""
    sent, own = map_folder(folder), engine.weights()
    assert sent.keys() == own.keys()
    for name, x in own.items():
        assert sent[name].dtype == (torch.bfloat16 if x.ndim > 1 else torch.float32)
        assert torch.equal(sent[name], x.to(sent[name].dtype))


def test_weights_have_the_dtype_of_the_servers(tmp_path):
    engine = trained(tmp_path)
    folders = WeightFolders(str(tmp_path))
    assert {x.dtype for x in map_folder(folders.write(engine, 0).folder).values()} == {torch.float32}
    folders.dtype = torch.bfloat16  # which the server said
    folder = folders.write(engine, 1).folder
    assert_sent(folder, engine)
    own = engine.weights().values()
    content = sum(x.numel() * (2 if x.ndim > 1 else 4) for x in own)
    assert content < weights.size_of(folder) < content + 200 * len(own)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert all(
        torch.equal(x, engine.weights()[name].to(x.dtype).bfloat16().float() if x.ndim > 1 else x)
        for name, x in model.state_dict().items()
        if name in engine.weights()
    )


def test_only_the_first_weights_are_saved_by_an_engine_whose_shards_they_are(tmp_path, monkeypatch):
    engine = trained(tmp_path)
    folders = WeightFolders(str(tmp_path))
    folders.dtype = torch.bfloat16
    first = folders.write(engine, 0).folder
    assert_sent(first, engine)
    monkeypatch.setattr(engine, "save", None)
    step(engine)
    folder = folders.write(engine, 1).folder
    assert_sent(folder, engine)
    assert {path.name for path in folder.iterdir()} == {path.name for path in first.iterdir()}
    assert stat.S_IMODE((folder / "model.safetensors").stat().st_mode) == 0o600
    assert stat.S_IMODE(folders.root.stat().st_mode) == 0o700


@pytest.mark.parametrize("ready", [False, True])
def test_untied_weights_stay_untied(tmp_path, ready):
    engine = trained(tmp_path, tie_word_embeddings=True)
    folders = WeightFolders(str(tmp_path), untie=True)
    folders.dtype = torch.bfloat16 if ready else None
    for number in range(2):
        sent = map_folder(folders.write(engine, number).folder)
        assert torch.equal(sent["lm_head.weight"], sent["model.embed_tokens.weight"])
        step(engine)


def test_weights_that_are_not_finite_are_not_sent(tmp_path):
    engine = trained(tmp_path)
    folders = WeightFolders(str(tmp_path))
    folders.write(engine, 0)
    engine.module.model.norm.weight.data[3] = torch.nan
    with pytest.raises(RunError, match=r"weight 'model.norm.weight' is not finite"):
        folders.write(engine, 1)


def assert_delta(written, copy):
    """Apply a delta to the copy of a server, and check the result."""
    assert digest(copy) == written.base
    for file in sorted(written.delta.iterdir()):
        apply(load_file(file), copy)
    new = map_folder(written.folder)
    assert digest(copy) == written.digest == digest(new)
    assert all(torch.equal(bits(copy[name]), bits(x)) for name, x in new.items())


def test_a_delta_turns_the_previous_weights_into_the_current_ones(tmp_path):
    engine = trained(tmp_path, lr=1e-5)
    folders = WeightFolders(None, deltas=True)
    folders.dtype = torch.bfloat16
    first = folders.write(engine, 0)
    assert first.base is None
    copy = {name: x.clone() for name, x in map_folder(first.folder).items()}
    for number in (1, 2):
        step(engine)
        written = folders.write(engine, number)
        assert_delta(written, copy)
        folders.keep_only(written.folder)
        assert {path.name for path in folders.root.iterdir()} == {f"update_{number}", f"update_{number}_delta"}
    folders.remove()


def write_shards(folder, sharding, config):
    """Write weights of a sharded engine, with a fault on rank 1 in between. Return the errors, and what was changed."""
    engine = trained(folder, lr=1e-5, sharding=sharding, **config)
    folders = WeightFolders(str(folder), current(), deltas=True)
    folders.dtype = torch.bfloat16
    copy = {name: x.clone() for name, x in map_folder(folders.write(engine, 0).folder).items()}
    engine.save = None  # no rank gathers all weights again
    step(engine)
    errors = []
    own = engine.shards()
    broken = {name: x for name, x in own.items() if not name.endswith("up_proj.weight")}
    engine.shards = lambda: own if current().leader else broken
    try:
        folders.write(engine, 1)
    except Exception as error:
        errors.append(str(error))
    del engine.shards
    written = folders.write(engine, 2)
    assert_sent(written.folder, engine)
    assert_delta(written, copy)
    current().barrier()
    return errors, len(list(written.delta.iterdir()))


@pytest.mark.parametrize(
    ("sharding", "config"),
    [
        (Sharding(), {}),
        pytest.param(Sharding(tensor=2), {}, marks=pytest.mark.slow),
        (Sharding(pipeline=2), {}),
        pytest.param(Sharding(pipeline=2), {"tie_word_embeddings": True}, marks=pytest.mark.slow),
    ],
)
def test_all_ranks_write_their_shards_and_an_error_on_one_rank_is_raised_on_all(tmp_path, sharding, config):
    for errors, files in run_ranks(2, write_shards, tmp_path, sharding, config):
        assert len(errors) == 1
        assert files == 2
