"""One command in a process group of its own, ended whole when its time is up, and what became of it in words."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemory|MemoryError|hipErrorOutOfMemory|std::bad_alloc", re.I)


@dataclass(frozen=True)
class Ended:
    """How a command ended: `code` is its exit status, None where it had none; `why` is "" only after status 0."""

    code: int | None
    seconds: float
    why: str
    hung: bool = False


def run(
    command: Sequence[str], limit_s: float, log: Path, *, cwd: Path | None = None, env: dict[str, str] | None = None,
    follow: Callable[[str], None] = lambda words: None,
) -> Ended:  # fmt: skip
    """Run a command to its end or until `limit_s`; no process of its group is left when this returns or raises.

    Args:
        log: a file for its output, both streams; appended to.
        env: added to this process's environment.
        follow: called some times a second with the last words of the log.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    began, process, hung = time.monotonic(), None, False
    with open(log, "ab") as file:
        start = file.tell()
        try:
            process = subprocess.Popen(
                list(command), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, cwd=cwd,
                env={**os.environ, **(env or {})}, start_new_session=True, preexec_fn=_die_with_parent,
            )  # fmt: skip
        except OSError as error:
            return Ended(None, 0.0, f"could not start {command[0]}: {error.strerror}")
        try:
            while process.poll() is None:
                if time.monotonic() - began > limit_s:
                    hung = True
                    break
                follow(last_words(log, start))
                time.sleep(min(0.3, 0.01 + (time.monotonic() - began) / 10))
        finally:
            _end_group(process)
    seconds, words = time.monotonic() - began, last_words(log, start)
    if hung:
        return Ended(process.returncode, seconds, f"not done within {limit_s:.0f} s, ended; it last said: {words or 'nothing'}", True)
    if process.returncode == 0:
        return Ended(0, seconds, "")
    memory = _memory_words(log, start)
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        why = f"ended by {name}" + (", as a host out of memory does" if name == "SIGKILL" else "")
        why += f": {memory}" if memory else f"; it last said: {words or 'nothing'}"
    elif memory:
        why = f"out of memory: {memory}"
    else:
        why = f"exit status {process.returncode}: {words or 'it said nothing'}"
    return Ended(process.returncode, seconds, why)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _end_group(process: subprocess.Popen) -> None:
    """Kill what is left of the group: the command itself, and whoever it started and left behind."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def last_words(log: Path, start: int = 0) -> str:
    """The last line of a log that says something, at most 300 letters."""
    lines = [line.strip() for line in re.split(r"[\r\n]", _tail(log, start)) if line.strip()]
    return lines[-1][-300:] if lines else ""


def _memory_words(log: Path, start: int) -> str:
    hits = [line.strip() for line in _tail(log, start, 20_000).splitlines() if OUT_OF_MEMORY.search(line)]
    return hits[-1][:300] if hits else ""


def _tail(log: Path, start: int, count: int = 4000) -> str:
    with open(log, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(start, end - count))
        return file.read().decode(errors="replace")
