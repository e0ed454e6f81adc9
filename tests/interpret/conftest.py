"""These tests run the kernels themselves in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/interpret`.

The interpreter sorts element by element through thousands of tiny calls. `numpy_sort`, on unless a test is marked
`real_sort`, replaces `tl.sort` and `tl.topk`, which are right there (and which `real_sort` tests run as they are).
"""

import os

import pytest

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


def pytest_configure(config):
    config.addinivalue_line("markers", "real_sort: runs Triton's own sort and topk in the interpreter")
    if os.environ.get("TRITON_INTERPRET") == "1":
        import quick_interpreter

        quick_interpreter.patch_once_a_launch()
        quick_interpreter.know_types()
        quick_interpreter.leave_out_lost_checks()
        quick_interpreter.share_shapes()


@pytest.fixture
def short_waits(monkeypatch):
    """For virtual ranks, which run in turn, so what has not come by now never will: a wait gives up in a second, not in minutes."""
    from m3cp import decode

    monkeypatch.setattr(decode, "spin_limit", lambda device: 50)


@pytest.fixture(autouse=True)
def numpy_sort(request, monkeypatch):
    import quick_interpreter

    if not request.node.get_closest_marker("real_sort"):
        quick_interpreter.sort_in_numpy(monkeypatch)
