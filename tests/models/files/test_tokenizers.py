"""Test that tokenizers are read as their files define them, and that saved tokenizers are read back the same."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from realign.errors import DataError
from realign.models.files.tokenizers import (
    difference,
    has_tokenizer,
    read_tokenizer,
    save_tokenizer,
)
from tests.grids import rotating
from tests.tiny import FAMILIES, save_tiny, tiny_config, tiny_tokenizer

TEXT = "1 + 2\n= 3<eos>ok"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def ids(tokenizer) -> list[int]:
    return tokenizer(TEXT, add_special_tokens=False)["input_ids"]


def chat_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_tokenizer_beside_any_family_is_read_from_tokenizer_json(tmp_path, family):
    tiny_config(family).save_pretrained(tmp_path)
    chat_tokenizer().save_pretrained(tmp_path)
    read = read_tokenizer("models.actor.path", str(tmp_path), trust_remote_code=False)
    assert ids(read) == ids(tiny_tokenizer())
    assert (read.eos_token, read.pad_token, read.chat_template) == ("<eos>", "<pad>", TEMPLATE)


@pytest.mark.parametrize(("family", "trust"), rotating(sorted(FAMILIES), [None, False, True]))
def test_autotokenizer_reads_a_saved_tokenizer_beside_any_family(tmp_path, family, trust):
    tiny_config(family).save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_tokenizer(chat_tokenizer(), tmp_path)
    back = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=trust)
    assert difference(back, chat_tokenizer()) is None
    assert ids(back) == ids(tiny_tokenizer())


def test_a_saved_tokenizer_survives_further_reads_and_saves(tmp_path):
    tokenizer = chat_tokenizer()
    for stage in ("a", "b", "c"):
        tiny_config("qwen2").save_pretrained(tmp_path / stage)
        save_tokenizer(tokenizer, tmp_path / stage)
        tokenizer = read_tokenizer("models.actor.path", str(tmp_path / stage), trust_remote_code=stage == "b")
    assert difference(tokenizer, chat_tokenizer()) is None
    assert json.loads((tmp_path / "c" / "tokenizer.json").read_text())["model"]["type"] == "WordLevel"


def test_only_a_folder_that_autotokenizer_would_misread_gets_a_class_of_its_own(tmp_path):
    for family in ("llama", "qwen2"):
        tiny_config(family).save_pretrained(tmp_path / family)
        save_tokenizer(tiny_tokenizer(), tmp_path / family)
    named = {
        family: "auto_map" in (tmp_path / family / "tokenizer_config.json").read_text()
        for family in FAMILIES
        if (tmp_path / family).is_dir()
    }
    assert named == {"llama": False, "qwen2": True}
    assert not (tmp_path / "llama" / "tokenizer_of_file.py").exists()


def test_a_special_token_that_only_the_class_defines_is_one_token_before_and_after_a_save(tmp_path):
    """A qwen2 folder whose vocabulary contains <|endoftext|>, but whose tokenizer.json does not mark it as special."""
    words = tiny_tokenizer()
    words.save_pretrained(tmp_path)
    tiny_config("qwen2").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["unk_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    text = (tmp_path / "tokenizer.json").read_text().replace("<r1>", "<|endoftext|>")
    (tmp_path / "tokenizer.json").write_text(text)
    read = read_tokenizer("models.actor.path", str(tmp_path), trust_remote_code=False)
    assert read("1<|endoftext|>2", add_special_tokens=False)["input_ids"][1:-1] == [words.convert_tokens_to_ids("<r1>")]
    tiny_config("qwen2").save_pretrained(tmp_path / "saved")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_tokenizer(read, tmp_path / "saved")


def test_a_tokenizer_that_does_not_read_back_warns_and_the_save_continues(tmp_path, monkeypatch):
    tokenizer = tiny_tokenizer()
    monkeypatch.setattr(tokenizer, "save_pretrained", lambda folder: chat_tokenizer().save_pretrained(folder))
    with pytest.warns(UserWarning, match="the saved tokenizer differs from the tokenizer of the run: .*chat_template"):
        save_tokenizer(tokenizer, tmp_path)
    assert (tmp_path / "tokenizer.json").is_file()
    with pytest.warns(UserWarning, match=r"^runs/x/final/actor: the saved tokenizer differs"):
        save_tokenizer(tokenizer, tmp_path, Path("runs/x/final/actor"))


def test_a_folder_without_a_tokenizer_names_the_key_and_the_cure(tmp_path):
    assert not has_tokenizer(str(tmp_path))
    assert not has_tokenizer("owner/name")
    with pytest.raises(DataError, match=r"^models\.actor\.path=.*: the folder has no tokenizer.*\. Set x\.$"):
        read_tokenizer("models.actor.path", str(tmp_path), trust_remote_code=False, cure=" Set x.")


def test_a_chat_template_that_is_a_link_to_another_file_is_refused(tmp_path):
    folder = save_tiny(tmp_path / "model")
    for name, target in (("chat_template.jinja", "id_rsa"), ("additional_chat_templates/x.jinja", "id_rsa")):
        (tmp_path / target).write_text("PRIVATE KEY")
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(tmp_path / target)
        with pytest.raises(DataError, match=r"models\.actor\.path: .*jinja' is a link to another file"):
            read_tokenizer("models.actor.path", str(folder), trust_remote_code=False)
        (folder / name).unlink()
    (tmp_path / "chat_template.jinja").write_text("shared")
    (folder / "chat_template.jinja").symlink_to(tmp_path / "chat_template.jinja")
    assert read_tokenizer("models.actor.path", str(folder), trust_remote_code=False).chat_template == "shared"
