"""Drivers of sweeps that are forked, with forked ranks: what takes half a minute by import takes half a second so."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from m3cp import ranks, records, sweep, timing, worker

SMALL_LLC = 1 << 16
CODE = records.code_hash()  # of what this process has imported, whatever becomes of the files


class Forked:
    """A child process with the part of Popen's interface that a launcher uses."""

    def __init__(self, body: Callable[[], int | None], log: Path):
        self.returncode: int | None = None
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                ranks.die_with_parent(parent)
                descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(descriptor, 1)
                os.dup2(descriptor, 2)
                faulthandler.enable(2)
                sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
                status = body() or 0
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(status)

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        return self._wait(0)

    def _wait(self, how: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """Inside, ranks of this process are forks that run the same worker file or module, with `small`: torch is imported once."""

    def start(command, environment, log: Path, keep) -> Forked:
        *_, target, job = command

        def rank() -> None:
            os.environ.clear()
            os.environ.update(environment)
            small()
            sys.argv = [target, job]
            (runpy.run_path if target.endswith(".py") else runpy.run_module)(target, run_name="__main__")

        return Forked(rank, log)

    torch.set_num_threads(1)  # a fork must not enter this process's pool of threads
    processes, ranks.start = ranks.start, start
    try:
        yield
    finally:
        ranks.start = processes


def small() -> None:
    """In a process of its own: probes, pools and rounds as small as they can be."""
    worker.PROBE_BYTES["cpu"] = worker.POOL_BYTES["cpu"] = 1 << 20
    timing.EAGER_ARM_US, timing.EAGER_BLOCKS = 1, 1  # three rounds of one call


def driver(grid, out: Path, log: Path, spoil: Callable[[int], None] = lambda rank: None, stall_s=60.0, **options) -> Forked:
    """`m3cp sweep GRID --out OUT` as a fork, ranks forked too, probes and caches as small as they can be.

    Args:
        spoil: called with the rank in each rank before it begins.
        stall_s: as the launcher takes it.
    """

    def start(command, environment, log: Path, keep) -> Forked:
        def rank() -> None:
            os.environ.clear()
            os.environ.update(environment)
            spoil(int(environment["RANK"]))
            ranks.main([command[-1]])

        return Forked(rank, log)

    def body() -> int:
        ranks.start, sweep.launch = start, functools.partial(ranks.launch, stall_s=stall_s)
        small()
        records.code_hash = lambda: CODE
        facts = sweep.job_facts("cpu") | {"cpu_last_level_bytes": SMALL_LLC}
        sweep.job_facts = lambda device: facts
        try:
            return sweep.main(grid, device="cpu", out=out, commit="unknown", **options)
        except (ValueError, OSError) as error:  # as the command does
            print(f"m3cp sweep: {error}")
            return sweep.NOT_MEASURED

    return Forked(body, log)


def family(pid: int) -> list[int]:
    """The living processes that descend from `pid`, itself first."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if fields[0] not in "ZX":
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = [pid] if alive(pid) else []
    for one in found:
        found += children.get(one, [])
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until_gone(pids, seconds: float) -> list[int]:
    """Those of the processes that still live after so long."""
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [pid for pid in pids if alive(pid)]


def check_rows(path: Path, before: bytes) -> tuple[bytes, list[records.Row]]:
    """What a kill may leave: all rows from before as they were, whole rows behind them, no Point measured twice; at
    most the last line is torn. Returns the whole lines and their rows."""
    data = path.read_bytes() if path.exists() else b""
    whole = data[: data.rfind(b"\n") + 1]
    assert whole.startswith(before), "rows that were there have changed"
    rows = records.load(path) if path.exists() else []
    assert len(rows) == whole.count(b"\n")
    measured = [r.point for r in rows if r.status == "ok"]
    assert len(measured) == len(set(measured)), "a Point was measured twice"
    return whole, rows
