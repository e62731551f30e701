from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from realign.runtime.ray import connected


@pytest.fixture(scope="package")
def cluster() -> Iterator[None]:
    """Start one Ray cluster for all tests of this folder."""
    with connected(None, processes=6):
        yield


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, so that sums equal those of the workers for any number of cores, and cores are not
    oversubscribed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
