"""Keep the image processor of a model in the folders that a run saves."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

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
        if isinstance(file, str | Path) and Path(file).is_file():
            shutil.copy(file, folder / name)
