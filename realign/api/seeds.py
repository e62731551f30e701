"""`derive_seed`: independent seeds for the uses of one root seed."""

from __future__ import annotations

import hashlib
import json


def derive_seed(seed: int, *what: str | int) -> int:
    """A 63-bit seed for one use, independent between uses: the hash of the root seed and the names of the use.

    The JSON list keeps the names apart: ("a", "b") is another use than ("a/b",), and 1 another than "1".
    """
    text = json.dumps([part if isinstance(part, str) else int(part) for part in (seed, *what)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


__all__ = ["derive_seed"]
