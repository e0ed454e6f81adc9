"""Fresh memory is poisoned; tests that need GPUs are skipped in words where there are too few."""

import gc

import pytest
import torch
from problems import poison_fresh_memory

poison_fresh_memory()


def pytest_collection_modifyitems(items):
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        mark = item.get_closest_marker("multigpu")
        needed = (mark.kwargs.get("gpus", 2) if mark else 1) if mark or item.get_closest_marker("gpu") else 0
        if found < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, found {found}"))


def pytest_collection_finish():
    """What is loaded by now stays: collections, which kernels in the interpreter cause by the thousand, need not look at it."""
    gc.collect()
    gc.freeze()
