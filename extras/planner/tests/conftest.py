"""The tests of the planner start from what all tests of realign start from."""

from tests.conftest import blank_curves, same_threads  # noqa: F401
