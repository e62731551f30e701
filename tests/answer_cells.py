"""Cells of rows that are no answer, and that are the answer 4, as files, pandas, numpy and torch have them."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pandas as pd
import torch

NOTHING = [
    *(None, math.nan, "", "  \n", b"", [], (), [None], ["", None], {*()}, Decimal("nan")),
    *(np.nan, np.float32("nan"), np.array([]), np.array(None, dtype=object), np.array([None, math.nan], dtype=object)),
    *(pd.NA, pd.NaT, pd.Series([], dtype=object), [pd.NA], torch.tensor(math.nan), torch.tensor([])),
]
FOUR = [
    *(4, 4.0, "4", " 4\n", b"4", [4], ["4", "four"], ("IV", 4.0), {"4"}, Decimal(4), Decimal("4.00"), Fraction(8, 2)),
    *(np.int64(4), np.float32(4), np.float64(4), np.str_("4"), np.array(4.0), np.array([4]), np.array(["4", "x"])),
    *(pd.Series(["4", None]), pd.Series([4.0]), torch.tensor(4), torch.tensor([4.0]), [4, None]),
]
