import errno
import os
import pickle

import pytest

from realign.engines.files.folders import check_name, check_path, check_run_folder, refuse_link, save_folder
from realign.errors import ConfigError, DataError, TransientError


@pytest.mark.parametrize("name", ["actor", "ref_2", "Qwen2.5 run", "größe", "a" * 100, "grpo=1,kl", "$(x)"])
def test_ordinary_names_pass(name):
    check_name("name", name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../up",
        "a/b",
        "/tmp/x",
        "a\\b",
        ".hidden",
        "-rf",
        "a\nb",
        "a\0b",
        "\x1b[2J",
        " a",
        "a ",
        "é" * 51,
    ],
)
def test_what_is_no_name_of_a_file_is_refused(name):
    with pytest.raises(ConfigError, match=r"^models: .* is not a valid file name. Use up to 100 characters"):
        check_name("models:", name)


@pytest.mark.parametrize(
    "path", ["../secret", "owner/..", "owner/../x", "a/b/c", "~nobody-here/x", "owner/.hidden", ""]
)
def test_a_path_trick_is_no_hub_name(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigError, DataError), match=r"^models\.actor\.path="):
        check_path("models.actor.path", path)


@pytest.mark.parametrize("name", ["final", "step_000003", "best", "metrics.jsonl", "config.yaml", "checkpoints"])
def test_a_run_does_not_write_through_links_in_its_folder(name, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "actor").mkdir(parents=True)
    run = tmp_path / "run"
    run.mkdir()
    check_run_folder(run)
    (run / name).symlink_to(elsewhere)
    with pytest.raises(ConfigError, match=f"{name}' is a link to .*elsewhere'.* Remove the link"):
        check_run_folder(run)


def test_a_link_below_a_folder_of_models_is_found_and_a_dangling_one_too(tmp_path):
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "actor").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"actor' is a link to .*nowhere"):
        check_run_folder(tmp_path)


def test_the_folder_of_the_run_may_be_a_link(tmp_path):
    (tmp_path / "large_disk" / "final").mkdir(parents=True)
    (tmp_path / "run").symlink_to(tmp_path / "large_disk")
    check_run_folder(tmp_path / "run")


def test_a_model_is_not_written_over_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "actor").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is a link"):
        save_folder(tmp_path / "actor", lambda new: new.mkdir())
    assert (tmp_path / "actor").is_symlink()
    assert list((tmp_path / "elsewhere").iterdir()) == []
    refuse_link(tmp_path / "elsewhere")


@pytest.mark.parametrize(("code", "transient"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EACCES, False)])
def test_only_a_full_disk_is_an_error_that_a_restart_can_fix(tmp_path, code, transient):
    def write(new):
        raise OSError(code, os.strerror(code))

    with pytest.raises(OSError, match=f"actor was not saved: .*{os.strerror(code)}") as caught:
        save_folder(tmp_path / "actor", write)
    assert isinstance(caught.value, TransientError) == transient
    # ranks send exceptions to each other
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), type(caught.value))


def test_a_folder_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    def write(text):
        def into(new):
            new.mkdir()
            (new / "weights").write_text(text)
            assert text != "bad", "disk full"

        return into

    save_folder(tmp_path / "actor", write("one"))
    with pytest.raises(AssertionError, match="disk full"):
        save_folder(tmp_path / "actor", write("bad"))
    assert (tmp_path / "actor" / "weights").read_text() == "one"
    save_folder(tmp_path / "actor", write("two"))
    assert (tmp_path / "actor" / "weights").read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["actor"]
