"""The attack on rewards finds planted weak ones, and says nothing about strict ones."""

import re
from pathlib import Path

import pytest

import realign
from realign.errors import ConfigError
from realign.rewards.attack import attack, check_reward
from realign.rewards.judge import Judge
from realign.rewards.tags import tagged_answer
from tests.rewards.planted_rewards import CHOICES, GSM8K, MATH, STRICT, SUMS, VERL, WEAK, answer_in_response

GUIDE = Path(__file__).parents[2] / "docs/guides/rewards.md"
IGNORED = "the known answer earns no more"
"""What the table of the guide says about rewards whose known answers could not be told from others."""


def kinds_of(check):
    return ", ".join(sorted(finding.kind for finding in check.findings)) or (IGNORED if check.problem else "")


def rows_of_the_guide():
    """Return the kinds of wrong answers that find a reward, by what earns it, from the table of the guide."""
    section = GUIDE.read_text(encoding="utf-8").partition("## Try wrong answers")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| (.*?) \| ([^|]*?) \|$", section, re.MULTILINE)[1:])


@pytest.mark.parametrize("what", WEAK)
def test_the_attack_finds_a_weak_reward(what):
    check = check_reward(*WEAK[what])
    assert check.findings or check.problem
    kinds = rows_of_the_guide()[what]
    assert kinds_of(check) == kinds or (kinds == "almost all" and len(check.findings) >= 9)


@pytest.mark.parametrize("what", STRICT)
def test_the_attack_says_nothing_about_a_strict_reward(what):
    check = check_reward(*STRICT[what])
    assert (check.findings, check.problem) == ([], "")
    assert check.tried > 30
    assert check.rows >= 1


def test_the_guide_has_every_planted_reward():
    assert rows_of_the_guide().keys() == WEAK.keys()
    guide = " ".join(GUIDE.read_text(encoding="utf-8").split())
    assert [what for what in STRICT if what not in guide] == []


def test_the_answer_in_the_response_is_found_by_15_for_5():
    check = realign.check_reward(answer_in_response, [{"prompt": "What is 2 + 3?", "answer": "5"}])
    assert {"every number from 0 to 99", "the right answer inside a longer word"} <= {
        finding.kind for finding in check.findings
    }
    assert "'753' earns 1, and the right '5' 1" in str(check)
    assert repr(check) == str(check)


@pytest.mark.parametrize(
    ("rows", "right"),
    [
        (GSM8K, "72"),
        (MATH, r"\frac{3}{4}"),
        (CHOICES, "A"),
        (VERL, "72"),
        (
            [
                {"question": "?", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answer": i % 2}
                for i in range(4)
            ],
            "A",
        ),
        ([{"problem": "?", "Correct Answer": f"w{i}"} for i in range(3)], "w0"),
        ([{"prompt": "?", "reward_model": {"ground_truth": {"target": [f"w{i}", "z"]}}} for i in range(3)], "w0"),
    ],
)
def test_known_answers_are_found_in_the_layouts_of_data_sets(rows, right):
    asked: list[str] = []

    def collect(index, texts):
        asked.extend(texts)
        return [0.0] * len(texts)

    attack(rows, [""] * len(rows), collect)
    assert asked[0] == right


def test_a_function_that_fails_on_wrong_answers_gives_them_no_reward():
    def fragile(response, answer):
        return float(re.fullmatch(r"<answer>(.*)</answer>", response)[1] == answer)

    check = check_reward(fragile, SUMS)
    assert (check.rows, check.findings, check.problem) == (8, [], "")


def test_a_prompt_that_has_begun_the_thought_is_continued():
    rows = [{**row, "prompt": row["prompt"] + "\n<think>\n"} for row in SUMS]
    check = check_reward(tagged_answer, rows)
    assert (check.rows, check.findings, check.problem) == (8, [], "")


@pytest.mark.parametrize(
    "answers",
    [
        ['["a", "b"]', "[1, 2]", "{}", "[]", "null", '[{"name": "f"}]', '"x"', "1e999"],
        [[], {}, {"x": 1}, [1, 2], [[1], [2]], {"text": ["a"]}, [{"text": "a"}], object()],
        [None, float("nan"), "", " ", 0, -1, 10**400, True],
        ["²", "<answer></answer>", "####", r"\boxed{", r"\boxed{}", "\ud800", "\n", "{answer}"],
    ],
)
def test_no_cell_of_an_answer_ends_the_attack(answers):
    rows = [{"prompt": None, "answer": answer, "choices": ["x"] * 12} for answer in answers]
    assert str(check_reward(lambda response: float(len(response) % 7), rows))
    assert str(check_reward(lambda response, answer: float(response == str(answer)), rows))


@pytest.mark.parametrize(
    "function", ["http://localhost:1/score", Judge(model="m", base_url="http://localhost:1").load()]
)
def test_servers_and_judges_are_not_asked(function):
    with pytest.raises(ConfigError, match="servers and judges are not attacked"):
        check_reward(function, SUMS)
