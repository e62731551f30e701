from __future__ import annotations

import io
import json
import struct
import zlib

import pytest
import torch
from PIL import Image

from realign.data import PromptData, SupervisedData, Turns
from realign.engines.training.engine_state import copy_image_processor
from realign.errors import ConfigError, DataError
from tests.image_files import IMAGE_TEXT, image_processor, image_tokenizer, picture

RED, WIDE = (16, 16), (24, 8)
"""Width and height of two pictures, of 4 and 3 tokens."""


@pytest.fixture
def tokenizer(tmp_path):
    folder = tmp_path / "model"
    image_tokenizer().save_pretrained(folder)
    image_processor().save_pretrained(folder)
    made = image_tokenizer()
    made.name_or_path = str(folder)
    return made


def question(*texts):
    parts = [{"type": "image"} if text is None else {"type": "text", "text": text} for text in texts]
    return {"role": "user", "content": parts}


def answer(text):
    return {"role": "assistant", "content": text}


def written(folder, rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def pictures(folder):
    """Write two pictures, and return their names."""
    picture("red", RED).save(folder / "red.png")
    picture("blue", WIDE).save(folder / "wide.png")
    return ["red.png", "wide.png"]


def loaded(kind, tmp_path, rows, tokenizer, **settings):
    path = written(tmp_path, rows)
    return kind(path=path, images_column="images", image_folder=str(tmp_path), **settings).load(tokenizer)


def image_tokens(tokenizer, ids):
    return int((torch.as_tensor(ids) == tokenizer.convert_tokens_to_ids(IMAGE_TEXT)).sum())


def test_prompts_contain_the_tokens_and_the_patches_of_their_images(tmp_path, tokenizer):
    red, wide = pictures(tmp_path)
    rows = [
        {"images": [red], "messages": [question(None, "color?")]},
        {"images": [], "messages": [question("no picture")]},
        {"images": [wide, red], "messages": [question("one", None, "two", None)]},
    ]
    data = loaded(PromptData, tmp_path, rows, tokenizer)
    sample = data.sample([(0, 2), (0, 1), (0, 0)])
    counts = [image_tokens(tokenizer, ids) for ids in sample.sequences("prompt_ids")]
    assert counts == [7, 0, 4]
    grids = [[1, 2, 6], [1, 4, 4], [1, 4, 4]]
    assert sample["image_grid_thw"].tolist() == grids
    assert sample.lengths["image_grid_thw"].as_tuples() == ((2,), (0,), (1,))
    assert sample.lengths["pixel_values"].as_tuples() == ((28,), (0,), (16,))
    both = [picture("blue", WIDE), picture("red", RED), picture("red", RED)]
    wanted = image_processor()(both, return_tensors="pt")
    torch.testing.assert_close(sample["pixel_values"], wanted["pixel_values"])


@pytest.mark.parametrize("turns", [Turns.all, Turns.each])
def test_conversations_are_trained_on_the_answers_only(tmp_path, tokenizer, turns):
    red, wide = pictures(tmp_path)
    messages = [question(None, "first?"), answer("red"), question(None, "second?"), answer("blue")]
    data = loaded(
        SupervisedData, tmp_path, [{"images": [red, wide], "messages": messages}], tokenizer, train_on_turns=turns
    )
    sample = data.sample([(0, 0)])
    trained_images = [image_tokens(tokenizer, ids) for ids in sample.sequences()]
    assert trained_images == ([7] if turns is Turns.all else [4, 7])
    trained = sample["input_ids"][sample["loss_mask"]]
    assert image_tokens(tokenizer, trained) == 0
    assert tokenizer.decode(trained, skip_special_tokens=True).replace(" ", "") == "redblue"
    assert len(sample["image_grid_thw"]) == 2


def test_images_are_paths_pictures_or_bytes(tmp_path, tokenizer):
    buffer = io.BytesIO()
    picture("red", RED).save(buffer, "PNG")
    picture("red", RED).save(tmp_path / "red.png")
    forms = ["red.png", picture("red", RED), buffer.getvalue(), {"bytes": buffer.getvalue(), "path": None}]
    forms += [{"bytes": None, "path": "red.png"}, str(tmp_path / "red.png")]
    source = PromptData(path="unused.jsonl", images_column="images", image_folder=str(tmp_path))
    encoder = source.encoder(tokenizer)
    rows = [encoder({"images": form, "messages": [question(None, "color?")]}) for form in forms]
    first = rows[0].images.patches()["pixel_values"]
    for row in rows:
        assert image_tokens(tokenizer, row.sequences[0].ids) == 4
        assert torch.equal(row.images.patches()["pixel_values"], first)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"images": [], "messages": [question(None)]}, "0 images in column 'images', but its text has 1 image tokens"),
        ({"images": ["red.png"], "messages": [question("no part")]}, "1 images in column 'images', but its text has 0"),
        ({"images": ["none.png"], "messages": [question(None)]}, "cannot read the image 'none.png'"),
        (
            {"images": ["rows.jsonl"], "messages": [question(None)]},
            "cannot read the image 'rows.jsonl': it is none of PNG, ",
        ),
        ({"images": [3], "messages": [question(None)]}, "the image is 3; expected a path"),
        ({"messages": [question(None)]}, "no column 'images'"),
        (
            {"images": ["red.png"], "messages": [{"role": "user", "content": [{"type": "image", "image": "red.png"}]}]},
            "Only text and images are supported",
        ),
    ],
)
def test_rows_whose_images_do_not_fit_are_an_error(tmp_path, tokenizer, row, message):
    pictures(tmp_path)
    with pytest.raises(DataError, match=message):
        loaded(PromptData, tmp_path, [row], tokenizer)


def encoded(size, kind="PNG", **options):
    buffer = io.BytesIO()
    Image.effect_noise(size, 50).convert("RGB").save(buffer, kind, **options)
    return buffer.getvalue()


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, *chunks):
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"".join((b"\x89PNG\r\n\x1a\n", header, *chunks, chunk(b"IEND", b"")))


BAD = {
    "truncated PNG": encoded((64, 64))[:-2000],
    "truncated JPEG": encoded((64, 64), "JPEG")[:-500],
    "truncated WEBP": encoded((64, 64), "WEBP")[:-500],
    "13,000 x 13,000 pixels": png(13_000, 13_000, chunk(b"IDAT", zlib.compress(b"\0"))),
    "100,000 x 100,000 pixels": png(100_000, 100_000, chunk(b"IDAT", zlib.compress(b"\0"))),
    "compressed text": png(16, 16, chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(10**8)))),
    "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\nshowpage\n",
    "aspect ratio": encoded((4, 2000)),
    "empty": b"GIF89a",
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
@pytest.mark.parametrize("place", ["file", "column"])
def test_an_image_that_cannot_be_decoded_is_found_at_the_start_and_names_its_row(tmp_path, tokenizer, data, place):
    (tmp_path / "bad").write_bytes(data)
    rows = [{"messages": [question("x")], "images": []}, {"messages": [question(None)], "images": ["bad"]}]
    if place == "file":
        with pytest.raises(DataError, match=r"rows.jsonl, line 2: cannot read the image 'bad'"):
            loaded(PromptData, tmp_path, rows, tokenizer)
        return
    source = PromptData(path="unused.jsonl", images_column="images")
    with pytest.raises(DataError, match="cannot read the image"):
        source.encoder(tokenizer)({"images": [data], "messages": [question(None)]})


def test_code_beside_an_image_processor_is_not_run(tmp_path, monkeypatch):
    path = written(tmp_path, [{"images": ["red.png"], "messages": [question(None)]}])
    image_tokenizer().save_pretrained(tmp_path)
    names = {"image_processor_type": "TrapProcessor", "auto_map": {"AutoImageProcessor": "trap.TrapProcessor"}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(names))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "trap", "auto_map": names["auto_map"]}))
    (tmp_path / "trap.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))  # as from `yes`
    source = PromptData(path=path, images_column="images", image_processor=str(tmp_path))
    with pytest.raises(ConfigError, match="cannot load an image processor"):
        source.load(image_tokenizer())
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["gpt2", "owner/model"])
def test_the_image_processor_of_a_hub_repository_is_saved_with_a_model(tmp_path, monkeypatch, name):
    snapshot = tmp_path / "hub" / f"models--{name.replace('/', '--')}" / "snapshots" / "a1"
    snapshot.mkdir(parents=True)
    (snapshot / "preprocessor_config.json").write_text("{}")
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("a1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    tokenizer = image_tokenizer()
    for number, source in enumerate(("no/such/folder", "", name)):
        folder = tmp_path / str(number)
        folder.mkdir()
        tokenizer.name_or_path = source
        copy_image_processor(tokenizer, folder)
        assert (folder / "preprocessor_config.json").exists() == (source == name)
