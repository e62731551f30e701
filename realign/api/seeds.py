"""`derive_seed`: independent seeds for the uses of one root seed."""

from __future__ import annotations

import hashlib
import json


def derive_seed(seed: int, *what: str | int) -> int:
    """Derive a 63-bit seed for one use by hashing the root seed and the names of the use.

    Hashing a JSON list makes ("a", "b") differ from ("a/b",), and 1 from "1".
    """
    # int, since JSON rejects integers of numpy.
    text = json.dumps([part if isinstance(part, str) else int(part) for part in (seed, *what)])
    # 63 bits fit every signed 64-bit integer on the way to a generator.
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
