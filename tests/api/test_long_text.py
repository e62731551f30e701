import pytest

from realign.api.long_text import part_over


class Words:
    """A tokenizer with one token per word, which skips whitespace."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, text, **options):
        self.lengths.append(len(text))
        return {"input_ids": text.split()}


@pytest.mark.parametrize("end", [False, True])
def test_a_text_with_too_many_tokens_is_found_by_a_part_of_it(end):
    tokenizer, text = Words(), "".join(f"{i} " for i in range(2_000_000))
    part = part_over(tokenizer, text, 1000, end=end)
    assert part is not None
    assert text.endswith(part) if end else text.startswith(part)
    assert len(part.split()) > 1000
    assert sum(tokenizer.lengths) < 50_000


def test_a_text_that_may_fit_is_no_part():
    tokenizer = Words()
    assert part_over(tokenizer, "a " * 1000, 1) is None  # short: not tokenized
    assert tokenizer.lengths == []
    assert part_over(tokenizer, "a" + " " * 10**6 + "b", 2) is None
    assert part_over(tokenizer, "a" * 10**6, 1) is None
