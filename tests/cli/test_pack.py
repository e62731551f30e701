"""`realign pack` writes a step that another machine recomputes, and `realign replay` reads it as hostile input."""

from __future__ import annotations

import json
import math
import re
import shutil
import zipfile
from contextlib import nullcontext

import pytest

from realign.cli import main
from realign.cli.pack import check_targets
from realign.errors import ConfigError, RealignError
from realign.runtime.packed_step import PACK, TENSORS, differing_metrics, opened_pack

KINDS = {
    "grpo": ["experiment=grpo_arithmetic", "interfaces.actor.epochs=2", "interfaces.actor.n_minibatches=2"],
    "ppo": [
        "experiment=ppo_arithmetic",
        "models.critic.path=task/model",
        "interfaces.actor.kl.place=reward",
        "interfaces.actor.reward.scale=running",
    ],
    "lora": ["experiment=grpo_arithmetic", "models.actor.trains=lora", "models.actor.trains.rank=4"],
}


@pytest.fixture(scope="module")
def packed(task, train):
    """Return a function that trains three steps, packs step 3 and returns the file."""

    def pack(kind, *options):
        out = task / f"{kind}{''.join(options)}.zip"
        if out.exists():
            return out
        if not (task / "runs" / kind).exists():
            train(kind, *KINDS[kind], "steps=3", "microbatch.max_tokens_per_microbatch=64")
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(task)
            assert main(["pack", f"runs/{kind}", "3", "-o", str(out), *options]) == 0
        return out

    return pack


@pytest.mark.parametrize("kind", [k if k == "grpo" else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
@pytest.mark.parametrize("options", [[], ["--weights"]])
def test_a_packed_step_is_recomputed_in_another_folder_without_the_run(
    kind, options, packed, tmp_path, monkeypatch, capsys
):
    shutil.copy(packed(kind, *options), tmp_path / "step.zip")
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert main(["replay", "step.zip"]) == 0
    out = capsys.readouterr().out
    assert ("with its weights" if options else "from the outputs of its network") in out
    for line in [line for line in out.splitlines() if "recomputed" in line]:
        equal, shared = (int(word) for word in line.split("loss ")[1].split(", ")[1].split(" metrics")[0].split(" of "))
        assert equal == shared > 9, line
    assert list(tmp_path.iterdir()) == [tmp_path / "step.zip"]


def test_a_pack_has_no_paths_and_no_secrets(packed):
    path = packed("grpo")
    content = zipfile.ZipFile(path).read(PACK).decode()
    for cut in (str(path.parent), "task/model", "prompts.jsonl", "reward.py"):
        assert cut not in content, cut
    with opened_pack(path) as (step, _):
        assert "/" not in json.dumps(step.settings)
        assert step.settings["models"]["actor"]["path"] == "(path)"
        assert step.settings["interfaces"]["actor"]["epochs"] == 2


def test_a_changed_batch_gives_another_loss(packed, tmp_path, capsys):
    content = changed(packed("grpo"), tmp_path, lambda state: state["tree"]["calls"][0]["metrics"].update(loss=1.0))
    assert main(["replay", str(content)]) == 2
    assert "loss: " in capsys.readouterr().out


def changed(path, folder, change):
    """Return a copy of a pack whose JSON a function changed."""
    out = folder / "changed.zip"
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(out, "w") as copy:
        state = json.loads(archive.read(PACK))
        change(state)
        copy.writestr(PACK, json.dumps(state))
        copy.writestr(TENSORS, archive.read(TENSORS))
    return out


def interface(state):
    return state["tree"]["calls"][0]["interface"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: interface(s).update(_target_="os.system"), "no class of realign"),
        (lambda s: interface(s).update(_target_="realign.interfaces.grpo.os.system"), "no class of realign"),
        (lambda s: interface(s).update(objective={"_target_": "subprocess.Popen"}), "no class of realign"),
        (lambda s: interface(s).update(_target_="realign.interfaces.ppo.dataflow"), "no class of realign"),
        (lambda s: s["tree"].update(format=2), "format"),
        (lambda s: s["tree"].update(more=1), "more"),
        (lambda s: s["tree"]["calls"][0].update(version=-1), "version"),
        (lambda s: s["tree"]["calls"][0]["batch"].update(lengths=[]), "cannot be repeated"),
        (lambda s: s["tree"]["calls"][0].update(outputs=[]), "optimizer steps"),
        (lambda s: s["tree"]["calls"][0]["microbatch"].update(n_microbatches=0), "n_microbatches"),
    ],
)
def test_a_hostile_pack_constructs_nothing_and_is_one_line(change, message, packed, tmp_path, capsys):
    path = changed(packed("grpo"), tmp_path, change)
    capsys.readouterr()
    assert main(["replay", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert len(captured.err.splitlines()) == 1
    assert re.search(message, captured.err), captured.err


@pytest.mark.parametrize(
    ("name", "content", "options"),
    [
        ("../outside.txt", b"x", {}),
        ("/outside.txt", b"x", {}),
        ("weights/actor/model.safetensors", b"x", {}),
        ("weights/actor/model.py", b"x", {}),
        (PACK, b"{}", {}),
        ("bomb.json", bytes(1 << 20), {"compress_type": zipfile.ZIP_DEFLATED}),
    ],
)
def test_a_file_that_does_not_belong_into_a_pack_is_refused(name, content, options, packed, tmp_path, capsys):
    path = shutil.copy(packed("grpo"), tmp_path / "step.zip")
    with pytest.warns(match="Duplicate name") if name == PACK else nullcontext(), zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, content, **options)
    capsys.readouterr()
    assert main(["replay", str(path)]) == 2
    assert "this is no packed step" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step.zip"]


def test_a_pack_that_cannot_be_written_leaves_no_file(packed, task, tmp_path, monkeypatch, capsys):
    packed("grpo")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.chdir(task)
    monkeypatch.setattr("realign.runtime.packed_step.write_tensors", full)
    assert main(["pack", "runs/grpo", "3", "-o", str(tmp_path / "step.zip")]) == 75
    assert "No space left on device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_files_that_say_they_are_larger_than_the_pack_are_not_extracted(packed, tmp_path):
    path = shutil.copy(packed("grpo"), tmp_path / "step.zip")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("weights/actor/model.safetensors", b"x")
        entry = archive.getinfo("weights/actor/model.safetensors")
        entry.file_size = entry.compress_size = 2 * path.stat().st_size
    with pytest.raises(RealignError, match="its files are larger than itself"), opened_pack(path):
        pass


def test_other_files_are_no_pack(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        entry = zipfile.ZipInfo("x")
        entry.extract_version = 99  # a version of the format that Python does not know
        archive.writestr(entry, b"")
    for content in (b"PK\x03\x04 not a zip", path.read_bytes()):
        path.write_bytes(content)
        with pytest.raises(RealignError, match="this is no packed step"), opened_pack(path):
            pass


def test_only_classes_of_realign_are_constructed():
    objective = {"_target_": "realign.interfaces.components.objectives.Gspo"}
    check_targets({"_target_": "realign.interfaces.grpo.GRPOActorInterface", "objective": objective}, "a")
    others = ("realign.cli.commands.main", "torch.optim.Adam", "realign.interfaces.grpo.Path", "realign.api.os")
    for target in (*others, "grpo", "Mine"):  # a word could be the name of a module in the current folder
        with pytest.raises(ConfigError, match="no class of realign"):
            check_targets([{"x": {"_target_": target}}], "a")


def test_only_optimizers_of_torch_are_imported():
    optimizer = {"_target_": "realign.engines.training.torch_optimizer.TorchOptimizer"}
    check_targets({"optimizer": optimizer | {"of": "torch.optim.Muon"}}, "a")
    for of in ({"of": "mine.SGD"}, {"of": "torch.hub.load"}, {}):
        with pytest.raises(ConfigError, match="no class of realign"):
            check_targets({"optimizer": optimizer | of}, "a")


def test_the_tolerance_is_relative():
    packed = {"lr": 1e-6, "kl": 0.01, "loss": 100.0, "tiny": 1e-12}
    near = {"lr": 1.00001e-6, "kl": 0.0100005, "loss": 100.005, "tiny": 2e-12}
    assert differing_metrics(near, packed, 1e-4) == []
    far = {"lr": 5e-5, "kl": 0.0101, "loss": 100.1}
    assert [name for name, *_ in differing_metrics(far, packed, 1e-4)] == ["lr", "kl", "loss"]


def test_a_metric_that_is_nan_differs():
    assert [name for name, *_ in differing_metrics({"loss": math.nan, "kl": 1.0}, {"loss": 0.5, "kl": 1.0}, 0.1)] == [
        "loss"
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pack", "runs/x"], "realign pack expects a run and a step"),
        (["replay", "step.zip", "--weights"], "--weights does not apply to realign replay"),
    ],
)
def test_mistakes_are_one_line(words, message, capsys):
    assert main(words) == 2
    assert message in capsys.readouterr().err
