from dataclasses import replace

import pytest

from realign.errors import ConfigError
from realign.interfaces.rule_reward import RuleRewardInterface
from realign.rewards import FailureKind, RewardPool
from realign.rewards import sandbox as sandboxes
from realign.rewards.sandbox import Bubblewrap, ProgramLimits, SandboxMode, find_sandbox
from realign.rewards.unit_tests import UnitTests, UnitTestsFunction
from realign.rewards.unit_tests import passes as default

TESTS = {"tests": "assert double(2) == 4\nassert double(-1) == -2"}
RIGHT = "def double(x):\n    return 2 * x\n"


UNSAFE = UnitTestsFunction(mode=SandboxMode.off)


@pytest.fixture(params=list(SandboxMode))
def passes(request):
    """The reward function with and without a sandbox, where there is one."""
    if request.param is SandboxMode.required and isinstance(reason := find_sandbox(), str):
        pytest.skip(f"no sandbox on this machine: {reason}")
    return UnitTestsFunction(mode=request.param)


def block(code, language="python"):
    return f"Here it is:\n```{language}\n{code}```\nDone."


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (block(RIGHT), 1.0),
        (block(RIGHT, ""), 1.0),
        (RIGHT, 1.0),
        (block("def double(x):\n    return x + 2\n"), 0.0),
        (block(RIGHT) + block("double = 3\n"), 0.0),
        (block(RIGHT + "print('noise', end='')\n"), 1.0),
        (block("import sys\nsys.exit(0)\n"), 0.0),
        (block("import os\nos._exit(0)\n"), 0.0),
        (block("while True pass"), 0.0),
        (block("import sys\nprint(open(sys.argv[1]).read())\nsys.exit(0)\n"), 0.0),
        ("I cannot.", 0.0),
    ],
)
def test_a_program_earns_if_its_tests_run_to_their_end(passes, response, reward):
    assert passes("Double a number.", response, TESTS) == reward


def test_a_program_that_does_not_end_is_wrong_not_unjudged(passes):
    assert replace(passes, limits=ProgramLimits(timeout_s=0.5))("", "while True: pass", TESTS) == 0.0


def test_in_the_workers_a_row_without_tests_fails_alone():
    with RewardPool(UNSAFE, workers=1, timeout_s=30, memory_mb=2048, max_failed_fraction=0.5) as pool:
        scores = pool.score(["", ""], [RIGHT, RIGHT], [TESTS, {}])
    assert scores.values == [1.0, None]
    assert "KeyError: 'tests'" in scores.failures[0].message


@pytest.fixture
def use_sandbox(monkeypatch):
    """Choose what the search for a sandbox finds."""
    sandboxes._log_once.cache_clear()
    yield lambda result: monkeypatch.setattr(sandboxes, "find_sandbox", lambda: result)
    sandboxes._log_once.cache_clear()


def test_a_prepared_function_has_the_sandbox_of_the_run_and_never_falls_back(use_sandbox):
    sandbox = Bubblewrap("/no/such/bwrap", as_root=False, trees=())
    use_sandbox(sandbox)
    prepared = default.prepare()
    assert prepared == replace(default, sandbox=sandbox, mode=SandboxMode.required)
    with pytest.raises(FileNotFoundError):
        prepared("", RIGHT, TESTS)


@pytest.mark.parametrize(
    "settings", [{"function": "realign.rewards.unit_tests:passes"}, {"functions": {"tests": UnitTests()}}]
)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_without_a_sandbox_ends_when_its_interfaces_open(settings, workers, use_sandbox):
    use_sandbox("bwrap is not installed")
    with pytest.raises(ConfigError, match=r"sandbox=required: .* bwrap is not installed"):
        RuleRewardInterface(**settings, workers=workers).open()


@pytest.mark.parametrize(("mode", "said"), [("off", "without a sandbox"), ("required", "in a bubblewrap sandbox")])
def test_the_launch_table_says_whether_programs_run_in_a_sandbox(mode, said, use_sandbox):
    use_sandbox(Bubblewrap("bwrap", as_root=False, trees=()))
    interface = RuleRewardInterface(functions={"tests": UnitTests(sandbox=mode)}, workers=1)
    interface.open()
    interface.close()
    assert interface.describe(1)["programs of responses"] == said
    other = RuleRewardInterface("realign.rewards.arithmetic:exact_answer", workers=1)
    other.open()
    other.close()
    assert other.describe(1)["programs of responses"] == ""


@pytest.mark.parametrize("workers", [0, 1])
def test_programs_of_reward_workers_run_in_the_sandbox(workers, tmp_path):
    if isinstance(reason := find_sandbox(), str):
        pytest.skip(f"no sandbox on this machine: {reason}")
    outside = tmp_path / "file"
    outside.touch()
    reads = f"open({str(outside)!r})\n"
    settings = {"workers": workers, "timeout_s": 60.0, "memory_mb": 4096, "max_failed_fraction": 0.0}
    with RewardPool(UnitTests(sandbox="required").load(), **settings) as pool:
        assert pool.score(["", ""], [RIGHT, RIGHT + reads], [TESTS] * 2).values == [1.0, 0.0]
    with RewardPool(UnitTests(sandbox="off").load(), **settings) as pool:
        assert pool.score(["", ""], [RIGHT, RIGHT + reads], [TESTS] * 2).values == [1.0, 1.0]


def test_a_sandbox_that_stops_working_costs_rewards_and_gives_none(use_sandbox):
    use_sandbox(Bubblewrap("/bin/false", as_root=False, trees=()))
    with RewardPool(default, workers=1, timeout_s=60.0, memory_mb=None, max_failed_fraction=1.0) as pool:
        results = pool.score([""], [RIGHT], [TESTS])
    assert results.values == [None]
    assert [failure.kind for failure in results.failures] == [FailureKind.exception]
    assert "the program did not start" in results.failures[0].message
