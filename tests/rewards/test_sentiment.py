from __future__ import annotations

import pytest

from realign.rewards.sentiment import compound


def test_the_tone_is_that_of_prompt_and_response_together():
    # One word of valence v gives v / sqrt(v^2 + 15). "not" multiplies v by -0.74. In the lexicon, good = 1.9.
    assert compound("the soup was", "good .", {}) == pytest.approx(1.9 / (1.9**2 + 15) ** 0.5, abs=1e-4)
    denied = -0.74 * 1.9
    assert compound("the soup was not", "good .", {}) == pytest.approx(denied / (denied**2 + 15) ** 0.5, abs=1e-4)
    assert compound("the soup", "was green .", {}) == 0
