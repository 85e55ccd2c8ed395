"""Tests run one thread each: the suite itself is spread over the cores."""

import os

import pytest
import torch

os.environ["COLUMNS"] = "200"  # tables are read by tests at one width, whatever the terminal

torch.set_num_threads(1)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """pytest-xdist 3.8 writes a test's group where pytest 9.2 no longer looks for it, so that --dist loadgroup would do nothing."""
    for item in items:
        if "@" in (grouped := getattr(item, "_nodeid", "")) and hasattr(item, "_id"):
            item._id = type(item._id).parse(grouped)


@pytest.fixture(autouse=True)
def one_umask():
    """`serve` narrows the process's umask for good; what the next test makes must not depend on it."""
    mask = os.umask(0o022)
    os.umask(mask)
    yield
    os.umask(mask)
