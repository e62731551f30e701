import json
import re
import warnings

import pytest

from realign.cli import commands as cli
from realign.cli.check import verdict
from tests.data.chat_templates import CHATML, assistant, chat_tokenizer, user
from tests.tiny import tiny_model


@pytest.mark.parametrize(
    ("n", "line"),
    [
        (0, "All good: nothing was trained, nothing was written."),
        (1, "Finished with 1 warning (see above): nothing was trained, nothing was written."),
        (3, "Finished with 3 warnings (see above): nothing was trained, nothing was written."),
    ],
)
def test_the_last_line_counts_warnings(n, line):
    assert verdict(n) == line
    assert verdict(n, caches=True) == line.replace("written.", "written outside of the cache folder.")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Enter a folder with a chat model, and files of conversations, preferences and prompts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    tokenizer = chat_tokenizer(CHATML)
    tiny_model("llama", attention="eager", vocab_size=len(tokenizer)).save_pretrained("model")
    tokenizer.save_pretrained("model")
    turns = [user("hello"), assistant("hi"), user("1+1=")]
    rows = {
        "messages": [{"messages": [*turns, assistant("2")]}] * 4,
        "pairs": [{"chosen": [*turns, assistant("2")], "rejected": [*turns, assistant("3")]}] * 4,
        "prompts": [{"messages": turns, "answer": "2"}] * 4,
    }
    for name, data in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    return tmp_path


START = "  | <|im_start|>user\n  | hello<|im_end|>\n  | <|im_start|>assistant\n"
NEXT = "  | <|im_start|>user\n  | 1+1=<|im_end|>\n  | <|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (
            ["experiment=sft", "data.path=messages.jsonl"],
            f"trained tokens in [[brackets]]\n{START}  | [[hi<|im_end|>]]\n{NEXT}  | [[2<|im_end|>]]\n",
        ),
        (
            ["experiment=dpo", "data.path=pairs.jsonl"],
            f"\n  label 1\n{START}  | hi<|im_end|>\n{NEXT}  | [[2<|im_end|>]]\n"
            f"  label 0\n{START}  | hi<|im_end|>\n{NEXT}  | [[3<|im_end|>]]\n",
        ),
        (
            [
                "experiment=grpo",
                "data.path=prompts.jsonl",
                "interfaces.reward.function=realign.rewards.arithmetic:exact_answer",
                "interfaces.actor.generation.max_new_tokens=2",
            ],
            f"First row of the data\n{START}  | hi<|im_end|>\n{NEXT}",
        ),
    ],
    ids=["sft", "dpo", "grpo"],
)
def test_check_shows_one_row_with_its_trained_tokens(here, capsys, words, shown):
    assert cli.main(["check", "models.actor.path=model", "batch_prompts=4", *words]) == 0
    out = capsys.readouterr().out
    assert shown in out
    sampled = words[0] == "experiment=grpo"  # by an untrained model, without a reward
    assert out.endswith(f"{verdict(int(sampled))}\n")


def test_check_says_that_nothing_would_be_learned_if_no_response_has_a_reward(here, capsys):
    words = ["experiment=grpo", "models.actor.path=model", "data.path=prompts.jsonl", "batch_prompts=4"]
    words.append("interfaces.actor.generation.max_new_tokens=2")
    with pytest.warns(UserWarning, match=r"^Responses are cut off: .* limit of 2 tokens.*#truncated$"):
        assert cli.main(["check", *words, "interfaces.reward.function=realign.rewards.arithmetic:exact_answer"]) == 0
    assert capsys.readouterr().out.endswith(
        "Finished with 1 warning (see above): nothing was trained, nothing was written.\n"
    )
    (here / "reward.py").write_text("def half(solution_str, **more):\n    return {'score': 0.5}\n")
    assert cli.main(["check", *words, "interfaces.reward.function=reward.py:half"]) == 0
    out = capsys.readouterr().out
    assert "All good" in out
    assert re.search(r"reward calls +half\(solution_str, \*\*more\), as verl calls it", out)


def test_check_shows_the_rewards_of_known_answers(here, capsys):
    rows = [{"messages": [user(f"1+{n}=")], "answer": str(1 + n)} for n in range(4)]
    (here / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["experiment=grpo", "models.actor.path=model", "data.path=sums.jsonl", "batch_prompts=4"]
    words += ["interfaces.reward.function=realign.rewards.arithmetic:exact_answer", "interfaces.reward.workers=0"]
    words += ["interfaces.actor.generation.max_new_tokens=2", "interfaces.reward.known_answer=answer"]
    assert cli.main(["check", *words]) == 0
    shown = "\nKnown answers\n  interfaces.reward: mean reward 1 of right answers, 0 of wrong answers (4 rows)\n"
    assert shown in capsys.readouterr().out
    assert cli.main(["check", *words, "interfaces.reward.known_answer_template='<{answer}>'"]) == 2
    assert "right answers have a mean reward of 0 and wrong answers 0 (4 rows). Row " in capsys.readouterr().err


REWARDS = """
def careless(response, answer):
    return float(answer in response)

async def asking(response, answer):
    return float(answer in response)
"""


@pytest.mark.parametrize(
    ("settings", "shown", "warns"),
    [
        ({"function": "rewards.py:careless"}, "these earn as much as right ones:", True),
        ({"function": "realign.rewards.arithmetic:exact_answer"}, "earns as much as a right one", False),
        ({"function": "rewards.py:asking"}, "not tried (rewards.py:asking: a judge, a server or an async", False),
        ({"function": "rewards.py:careless", "keep_environment": "[MY_KEY]"}, "not tried (keep_environment=", False),
        ({"function": "null", "functions": "{a: rewards.py:careless, b: rewards.py:asking}"}, "not tried (b: a", False),
    ],
)
def test_check_tries_wrong_answers_on_the_reward(here, capsys, settings, shown, warns):
    rows = [{"messages": [user(f"1+{n}=")], "answer": str(1 + n)} for n in range(4)]
    (here / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (here / "rewards.py").write_text(REWARDS)
    words = ["experiment=grpo", "models.actor.path=model", "data.path=sums.jsonl", "batch_prompts=4"]
    words += ["interfaces.actor.generation.max_new_tokens=2", "interfaces.reward.workers=0"]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert (
            cli.main(["check", *words, *(f"interfaces.reward.{key}={value}" for key, value in settings.items())]) == 0
        )
    assert shown in capsys.readouterr().out.partition("\nWrong answers\n  interfaces.reward: ")[2]
    assert any("wrong answers earn as much as right ones" in str(w.message) for w in warned) == warns
