"""Starting one worker process a rank, and seeing that they end: the launcher of sweeps, checks and stress.

Workers die with the process that started them, and are all ended when one of them fails or nothing moves any more;
the error names the rank and what it said. A sweep's ranks begin in this module (`python -m m3cp.ranks JOB.json`).
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from m3cp import records

ROOT = records.PACKAGE.parent
STALL_S = 240.0  # without a sign of life; compiling every kernel takes less than a minute
TRACE_S = 2.0  # for a rank that stands still to write where it stands
# Frames of a rank that waits for others, which is not the one to blame, as fault handlers name them.
WAITING = re.compile(r'/worker\.py", line \d+ in exchange$|/exchange\.py"|/torch/distributed/', re.M)


class WorkersFailed(RuntimeError):
    """A rank raised, died or stalled; the message names it."""


def launch(
    module: str,
    job: dict[str, Any],
    processes: int,
    *,
    follow: Callable[[Path], None] = lambda scratch: None,
    stall_s: float = STALL_S,
    limit_s: float | None = None,
    keep: Sequence[int] = (),
) -> None:
    """Start `python -m MODULE JOB` once a rank and wait for all; none is left when this returns or raises.

    Args:
        module: a worker module, or the path of a Python file, that ends in `m3cp.worker.run`.
        job: plain JSON; `scratch` is added to it.
        processes: ranks.
        follow: called about ten times a second with the scratch folder, and once when no worker is left.
        stall_s: seconds without a sign of life after which the workers are ended.
        limit_s: seconds after which the workers are ended whatever they do.
        keep: descriptors that every rank inherits.

    Raises:
        WorkersFailed: naming the rank, and what it said.
    """
    with tempfile.TemporaryDirectory(prefix="m3cp-", ignore_cleanup_errors=True) as folder:
        scratch = Path(folder)
        (scratch / "job.json").write_text(json.dumps({**job, "scratch": folder}))
        (scratch / "beat").touch()
        command = [sys.executable, "-X", "faulthandler", *([module] if module.endswith(".py") else ["-m", module])]
        workers: list[subprocess.Popen] = []
        start_s = time.monotonic()
        try:
            for rank in range(processes):
                environment = _environment(rank, processes, job["device"])
                workers.append(start([*command, str(scratch / "job.json")], environment, scratch / f"log.{rank}", keep))
            while True:
                codes = [w.poll() for w in workers]
                follow(scratch)
                if any(codes):
                    raise WorkersFailed(_what_happened(scratch, workers))
                if all(code == 0 for code in codes):
                    return
                if time.time() - (scratch / "beat").stat().st_mtime > stall_s:
                    raise WorkersFailed(f"no rank has moved for {stall_s:.0f} s; {_who_stands_still(scratch, workers)}")
                if limit_s is not None and time.monotonic() - start_s > limit_s:
                    raise WorkersFailed(f"not done within {limit_s:.0f} s; {_who_stands_still(scratch, workers)}")
                time.sleep(0.1)
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.kill()
            for worker in workers:
                worker.wait()
            follow(scratch)  # what they did last


def start(command: Sequence[str], environment: dict[str, str], log: Path, keep: Sequence[int]) -> subprocess.Popen:
    """Start one rank, which dies with this process; what it says goes to `log`."""
    with open(log, "wb") as file:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=environment,
            pass_fds=tuple(keep), preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )  # fmt: skip


def _environment(rank: int, processes: int, device: str) -> dict[str, str]:
    env = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "PYTHONUNBUFFERED": "1",
    }
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    if device == "cpu":
        env["OMP_NUM_THREADS"] = "1"  # one core a rank, or the ranks get in each other's way
    if sys.platform == "linux":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here, and a host's own name need not resolve
    return env


def die_with_parent(parent: int) -> None:
    """In a child, before it does anything: be killed when the process that started it dies, however it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it was gone before the kernel was told
            os._exit(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _what_happened(scratch: Path, workers: Sequence[subprocess.Popen]) -> str:
    """Which rank failed first, and its words; ranks that only lost a peer are not blamed."""
    time.sleep(0.3)  # let a rank that fails in the same moment finish its sentence
    codes = [w.poll() for w in workers]
    spoke = {int(p.suffix[1:]): p for p in scratch.glob("error.*")}
    silent = [r for r, code in enumerate(codes) if code and r not in spoke and not (scratch / f"peer.{r}").exists()]
    if spoke and not silent:
        rank = min(spoke, key=lambda r: spoke[r].stat().st_mtime_ns)
        return f"rank {rank}: {spoke[rank].read_text()}"
    rank = silent[0] if silent else next(r for r, code in enumerate(codes) if code)
    how = f"signal {-codes[rank]}" if codes[rank] < 0 else f"exit status {codes[rank]}"
    if codes[rank] == -signal.SIGKILL:
        how += " (killed; by the system where memory ran out)"
    log = (scratch / f"log.{rank}").read_text(errors="replace").strip().splitlines()
    return f"rank {rank}: ended with {how} without a word{': ' + log[-1] if log else ''}"


def _who_stands_still(scratch: Path, workers: Sequence[subprocess.Popen]) -> str:
    """Which ranks stand where, the ones that do not wait for another first; asks each for its stack, which ends it."""
    before = [(scratch / f"log.{rank}").stat().st_size for rank in range(len(workers))]
    for worker in workers:
        if worker.poll() is None:
            worker.send_signal(signal.SIGABRT)
    deadline = time.monotonic() + TRACE_S
    while any(w.poll() is None for w in workers) and time.monotonic() < deadline:
        time.sleep(0.02)
    to_blame, waiting = [], []
    for rank, size in enumerate(before):
        with open(scratch / f"log.{rank}", "rb") as file:
            said = file.read(size).decode(errors="replace").strip().splitlines()
            stack = _main_stack(file.read().decode(errors="replace"))
        frames = re.findall(r'File "([^"]*)", line (\d+) in (\S+)', stack)
        words = f"rank {rank} last said: {said[-1][:300]}" if said else f"rank {rank} said nothing"
        if not frames:
            to_blame.append(f"{words} and does not answer")
            continue
        waits = WAITING.search(stack) is not None
        at = next((f for f in frames if f[0].startswith(str(records.PACKAGE))), frames[0])
        where = f"{Path(at[0]).name}, line {at[1]}, in {at[2]}"
        (waiting if waits else to_blame).append(f"{words} and {'waits for others' if waits else 'stands'} at {where}")
    return "; ".join([*to_blame, *waiting])


def _main_stack(dump: str) -> str:
    """The main thread's part of a fault handler's dump: the last one."""
    return re.split(r"^(?:Current thread|Thread) 0x", dump, flags=re.M)[-1]


def main(argv: Sequence[str]) -> None:
    """One rank of a sweep, `argv` being its job file."""
    from m3cp import worker

    worker.main(list(argv))


if __name__ == "__main__":
    main(sys.argv[1:])
