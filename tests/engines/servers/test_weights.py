"""Model folders for servers."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from realign.engines.servers.delivery import WeightFolders, untie
from realign.errors import ConfigError, TransientError
from tests.engines.servers.fake_server import random_table


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
    found = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert found.lm_head.weight is not found.model.embed_tokens.weight
    ids = torch.tensor([[1, 5, 7]])
    torch.testing.assert_close(found(ids).logits, model(ids).logits)


def test_an_untied_model_stays(tmp_path):
    tied_model(tmp_path)
    untie(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    untie(tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_unknown_embeddings_are_an_error(tmp_path):
    tied_model(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({"w": load_file(file)["model.norm.weight"]}, file)
    with pytest.raises(ConfigError, match=r"has no weight that ends in embed_tokens.weight. Set untie=false"):
        untie(tmp_path)


def test_a_full_disk_is_a_transient_error(tmp_path):
    class Full:
        def save(self, path):
            raise OSError(28, "No space left on device")

    folders = WeightFolders(str(tmp_path))
    with pytest.raises(TransientError, match=r"No space left on device. Set weights_dir to a folder with more space"):
        folders.write(Full(), 0)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"weights_dir=.*file.*: cannot be written"):
        WeightFolders(str(tmp_path / "file"))


def test_the_latest_weights_are_kept(tmp_path):
    folders = WeightFolders(str(tmp_path))
    written = [folders.write(random_table(i), i) for i in range(3)]
    folders.keep_only(written[-1])
    assert [folder.exists() for folder in written] == [False, False, True]
    folders.remove()
    assert not any(tmp_path.iterdir())
