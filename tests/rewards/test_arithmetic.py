import pytest

from realign.rewards import exact_answer


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [("42", 42, 1.0), (" 42\n", "42", 1.0), ("042", 42, 0.0), ("42.", 42, 0.0), ("", 0, 0.0), ("4 2", 42, 0.0)],
)
def test_only_the_exact_answer_earns(response, answer, reward):
    assert exact_answer("what is it?", response, {"answer": answer}) == reward
