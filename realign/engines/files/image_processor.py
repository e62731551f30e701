"""Keep the image processor of a model in the folders that a run saves."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

from realign.engines.files.model_folder import is_other_file

FILES = ("preprocessor_config.json", "processor_config.json")
"""Files of an image processor of transformers."""


def copy_image_processor(tokenizer: Any, folder: Path) -> None:
    """Copy the image processor in the folder, or the cached hub repository, of a tokenizer to `folder`, if any."""
    from huggingface_hub import try_to_load_from_cache

    source = str(tokenizer.name_or_path)
    for name in FILES:
        file: Any = Path(source, name)
        if not file.is_file() and not Path(source).is_dir() and source.count("/") == 1:
            file = try_to_load_from_cache(source, name)
        if not isinstance(file, str | Path) or not Path(file).is_file():
            continue
        if is_other_file(Path(file)):
            warnings.warn(
                f"{file} was not copied into {folder}: it is a link to a file of another name outside of its folder.",
                stacklevel=2,
            )
            continue
        shutil.copy(file, folder / name)
