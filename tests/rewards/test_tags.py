import pytest

from realign.rewards.tags import tagged_answer, well_formed

GOOD = "<think>2 and 2\nmake 4</think>\n<answer> 4 </answer>\n"


@pytest.mark.parametrize(
    ("response", "formed", "right"),
    [
        (GOOD, 1.0, 1.0),
        (GOOD.replace(" 4 ", "5"), 1.0, 0.0),
        ("<think></think><answer>4</answer>", 1.0, 1.0),
        ("4", 0.0, 0.0),
        ("so " + GOOD, 0.0, 0.0),
        (GOOD + "or 5", 0.0, 0.0),
        ("<think>a</think> text <answer>4</answer>", 0.0, 0.0),
        ("<answer>4</answer><think>a</think>", 0.0, 0.0),
        ("<think>a<think>b</think><answer>4</answer>", 0.0, 0.0),
        ("<think>a</think><answer>5</answer><answer>4</answer>", 0.0, 0.0),
        ("<think>a</think><answer>4", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_one_thought_then_one_answer(response, formed, right):
    assert well_formed("what is 2 + 2?", response, {}) == formed
    assert tagged_answer("what is 2 + 2?", response, {"answer": 4}) == right
