import pytest

from realign.rewards import RewardPool
from realign.rewards.verified_math import same_value

NAME = "realign.rewards.verified_math:same_value"
CASES = [
    (72, "so there are 72 of them", 1.0),
    ("1/2", r"thus \boxed{0.5}", 1.0),
    (r"\frac{1}{2}", r"\boxed{\frac12}", 1.0),
    (r"$x^2+1$", "$1+x^2$", 1.0),
    ("x^2+1", "$x^2-1$", 0.0),
    (r"\boxed{3}", r"not 3, but \boxed{4}", 0.0),
    ("1,000", "1000", 1.0),
    ("3", "no idea", 0.0),
    # as in MATH
    (r"\$5", r"\boxed{5}", 1.0),
    (r"\$5", r"It costs \$5.", 1.0),
    (r"\$32,348", r"\boxed{\$32,348}", 1.0),
    (r"\$32,\!348", "32348", 1.0),
    (r"\$5", r"\boxed{6}", 0.0),
    (r"\$18.90", r"$x = \$18.9$", 1.0),
    (r"50\%", r"\boxed{50\%}", 1.0),
    (r"12 \text{ cm}", r"\boxed{12}", 1.0),
    (r"\boxed{\$5}", "5", 1.0),
    (["1/3", "0.5"], r"\boxed{\frac12}", 1.0),
]


@pytest.mark.parametrize(("answer", "response", "reward"), CASES)
def test_answers_are_compared_by_value(answer, response, reward):
    assert same_value("", response, {"answer": answer}) == reward


def test_an_answer_that_is_no_mathematics_judges_nobody():
    assert same_value("", "3", {"answer": ""}) is None


def test_in_the_workers():
    with RewardPool(NAME, workers=1, timeout_s=60, memory_mb=2048, max_failed_fraction=0.0) as pool:
        scores = pool.score([""] * len(CASES), [c[1] for c in CASES], [{"answer": c[0]} for c in CASES])
    assert scores.values == [c[2] for c in CASES]
