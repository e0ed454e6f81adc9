"""The first quarter of an hour on a node nobody has run on: every step in rising risk, each a process with a watchdog.

`make mi355x` on four MI355X, `make node` anywhere: doctor, footprint curve, staged check over the collectives, the
kernels that follow compiled side by side, engines, ping-pong, stress of the two forms whose programs wait, the published
shapes warm and cold, the targets' grid, what compilers made, AITER's CP selector, which waits without a bound; then fit,
policy, design review, one page, one archive. A step that hangs, crashes or finds nothing to
run is a line on the page, and the rest goes on. State stands in the run's folder: the same command goes on where the
last stretch stopped. Needs torch, triton, numpy, pandas, scipy and matplotlib; papermill only for the design review.
"""

from __future__ import annotations

import argparse
import os
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from m3cp import records, watchdog
from m3cp.kit_state import (
    CUT,
    DONE,
    FACTS_FILE,
    FAILED,
    LEFT_OUT,
    RUNNING,
    Cut,
    LeftOut,
    Record,
    State,
    now,
    read,
    write,
)
from m3cp.kit_steps import STEPS, Step
from m3cp.shapes import require

LEFT_OUT_STATUS, CUT_STATUS = 3, 4  # exit statuses of a step beside 0
STRETCH_MINUTES = 9.0
KEEP_S = 60.0  # of a stretch, for fit, policy, page and archive
LATE_S = 40.0  # between a sweep's own deadline and its watchdog: ranks start, and end the group that they are at
TRIES = 2  # running, of a step that took the kit or its time down with it


def command_of(step: Step, run: Path, seconds: float) -> list[str]:
    """How a step is started."""
    return [sys.executable, "-m", "m3cp.kit", "--step", step.name, "--out", str(run), "--seconds", f"{seconds:.0f}"]


def take(step: Step, state: State, run: Path, limit_s: float, command: Sequence[str], follow: Callable[[str], None]) -> Record:
    """Run one step under its watchdog and record what became of it, before and after."""
    record = state.steps.setdefault(step.name, Record())
    record.tries += 1
    record.status, record.why = RUNNING, ""
    state.save(run)
    lines = run / "said" / f"{step.name}.json"
    lines.unlink(missing_ok=True)
    path = os.pathsep.join([str(records.PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    log = run / "logs" / f"{step.name}.log"
    ended = watchdog.run(command, limit_s, log, cwd=records.PACKAGE.parent, env={"PYTHONPATH": path}, follow=follow)
    said = read(lines) or {}
    record.seconds += ended.seconds
    record.lines = said.get("lines", [])
    if ended.code in (0, LEFT_OUT_STATUS, CUT_STATUS):
        record.tries = 0  # it ended by its own will
    if ended.code == 0:
        record.status = DONE
    elif ended.code == LEFT_OUT_STATUS:
        record.status, record.why = LEFT_OUT, said.get("why", "")
    elif ended.code == CUT_STATUS or (ended.hung and limit_s < step.limit_s and record.tries < TRIES):
        record.status, record.why = CUT, said.get("why", "") or ended.why
    else:
        record.status, record.why = FAILED, said.get("why", "") or ended.why
        if step.form:
            _refuse(step.form, run, record.why)
    state.save(run)
    return record


def _refuse(form: str, run: Path, why: str) -> None:
    """Keep the refusal of a form whose stress did not come to its own verdict: it hung, or took the process with it."""
    from m3cp import trust

    here = read(run / FACTS_FILE)
    if here and not any(v.form == form and not v.trusted for v in trust.load(run / trust.FILE)):
        trust.say(form, here["node"], here["ranks"], run, trusted=False, why=why)


def stretch(
    run: Path, name: str, minutes: float = STRETCH_MINUTES, steps: Sequence[Step] = STEPS, retry: bool = False, only: Sequence[str] = (),
    device: str | None = None, commit: str | None = None, command: Callable[[Step, Path, float], Sequence[str]] = command_of, keep_s: float = KEEP_S,
) -> State:  # fmt: skip
    """Run what is left of the kit for at most `minutes`, then analyse what there is; the state and an archive stay.

    Args:
        run: the run's folder; made when missing.
        name: of the archive.
        retry: steps that failed are tried again.
        only: names of the steps to run; all when empty.
        device: "cuda" or "cpu"; None for what the machine has. A folder keeps what it began with.
        commit: of this code, where the copy that runs has no git history.
        command: how a step is started.
        keep_s: seconds at the end that measuring leaves alone.

    Raises:
        ValueError: too few minutes, a step that does not exist, or a folder of other code.
    """
    began = time.monotonic()
    unknown = sorted(set(only) - {s.name for s in steps})
    require("only", tuple(only), not unknown, f"among {', '.join(s.name for s in steps)}")
    # The longest step must fit.
    least = (max((s.usual_s for s in steps if not s.always), default=0) + keep_s) / 60
    require("minutes", minutes, minutes >= least, f"{least:.1f} or more: the longest step and the analysis must fit")
    run.mkdir(parents=True, exist_ok=True)
    state = State.load(run, name, device, commit)
    state.stretches += 1
    for record in state.steps.values():  # the last stretch ended within this step, and not by its own will
        if record.status == RUNNING:
            record.status, record.why = (CUT, "the kit was ended within it") if record.tries < TRIES else (
                FAILED, f"the kit was ended within it {record.tries} times")  # fmt: skip
    state.save(run)
    wanted = [s for s in steps if not only or s.name in only]
    todo = [s for s in wanted if not s.always and _open(state, s, retry)]
    print(f"{name}: {len(todo)} steps to run, at most {minutes:g} minutes now; {run}", flush=True)
    while todo:
        step = todo.pop(0)
        left = minutes * 60 - (time.monotonic() - began) - keep_s
        untold = [s.title for s in wanted[: wanted.index(step)] if s.form and _open(state, s, False)] if step.resumable else []
        if left < step.usual_s or untold:  # a sweep would make the missing stress check itself, out of its own time
            record = state.steps.setdefault(step.name, Record())
            why = f"waits for {untold[0]}" if untold else "the stretch's time was up"
            record.status, record.why = CUT, record.why or f"{why}: run the same command again"
            continue
        limit = min(step.limit_s, left)
        # A sweep stops by itself; the watchdog gives it time to write down what it was at.
        grace = min(LATE_S, 0.4 * limit) if step.resumable else 0.0
        record = _tell(step, limit, lambda follow, step=step, limit=limit, grace=grace: take(
            step, state, run, limit, command(step, run, limit - grace), follow))  # fmt: skip
        if record.status == CUT and step.resumable:
            todo.append(step)  # goes on where it stopped, once the others had their turn
    for step in (s for s in wanted if s.always):
        _tell(step, step.limit_s, lambda follow, step=step: take(step, state, run, step.limit_s, command(step, run, step.limit_s), follow))
    print(f"archive: {archive(run, name)}", flush=True)
    return state


def _tell(step: Step, limit_s: float, act: Callable[[Callable[[str], None]], Record]) -> Record:
    """Say what starts, how it moves and how it ended."""
    print(f"{step.title}: usually {step.usual_s:.0f} s, at most {limit_s:.0f} s", flush=True)
    record = act(_Follow(limit_s))
    tail = record.words
    print(f"    {record.status} in {record.seconds:.0f} s{': ' + tail if tail else ''}", flush=True)
    return record


def _open(state: State, step: Step, retry: bool) -> bool:
    """Whether a measuring step still has something to do."""
    record = state.steps.get(step.name)
    return record is None or record.status in ("", CUT) or (retry and record.status in (FAILED, LEFT_OUT))


class _Follow:
    """A step's progress: its bar on a terminal, a line every half minute elsewhere."""

    def __init__(self, limit_s: float):
        self._limit, self._start, self._told = limit_s, time.monotonic(), 0.0
        self._terminal = sys.stdout.isatty()

    def __call__(self, words: str) -> None:
        past = time.monotonic() - self._start
        if past - self._told < (0.5 if self._terminal else 30.0):
            return
        self._told = past
        bar = "#" * min(20, round(20 * past / self._limit))
        text = f"    [{bar:20}] {past:.0f} s: {words}"[:150]
        print(f"\r{text:150}" if self._terminal else text, end="\r" if self._terminal else "\n", flush=True)


def archive(run: Path, name: str) -> Path:
    """Everything of the run in one `<name>.tar.gz` in its folder: rows, provenance, results, figures, logs, the page."""
    path = run / f"{name}.tar.gz"
    part = path.with_suffix(".part")
    with tarfile.open(part, "w:gz") as tar:
        for file in sorted(run.rglob("*")):
            if file.is_file() and not file.name.endswith((".part", ".tar.gz")):
                tar.add(file, arcname=f"{name}/{file.relative_to(run)}", filter=_anonymous)
    os.replace(part, path)
    return path


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def default_out(name: str) -> Path:
    """A folder for this code's run: other code begins another one."""
    return records.PACKAGE.parent / "data" / "runs" / f"{name}-{records.code_hash()}"


def run_step(name: str, run: Path, seconds: float) -> int:
    """What a step's process does; the exit status. Its words go to `said/`, for the page."""
    step = next(s for s in STEPS if s.name == name)
    said: dict[str, Any] = {"time_utc": now()}
    status = 0
    try:
        said["lines"] = [line.replace(str(run), run.name) for line in step.run(run, seconds)]
        print("\n".join(said["lines"]), flush=True)
    except LeftOut as why:
        said["why"], status = str(why), LEFT_OUT_STATUS
    except Cut as why:
        said["why"], status = str(why), CUT_STATUS
    except Exception as error:
        import traceback

        traceback.print_exc()
        said["why"], status = _shortened(f"{type(error).__name__}: {error}"), 1
    write(run / "said" / f"{name}.json", said)
    return status


def _shortened(text: str) -> str:
    """At most 1500 letters; where the first line only announces (`...Error:`), the last one follows it."""
    lines = text.splitlines()
    if len(lines) > 1 and lines[0].rstrip().endswith(":"):
        text = "\n".join([f"{lines[0].rstrip()} {next((x for x in reversed(lines[1:]) if x.strip()), '').strip()}"[:600], *lines[1:]])
    return text if len(text) <= 1500 else f"{text[:700]}\n...\n{text[-795:]}"


def main(
    name: str = "node", out: Path | None = None, minutes: float = STRETCH_MINUTES, retry: bool = False, only: Sequence[str] = (),
    device: str | None = None, commit: str | None = None,
) -> int:  # fmt: skip
    """What `m3cp node` does; 0 when no step failed and none is left, 1 when one failed, 2 when time was up before the end."""
    run = (out or default_out(name)).resolve()
    state = stretch(run, name, minutes, retry=retry, only=only, device=device, commit=commit)
    statuses = [record.status for record in state.steps.values()]
    if CUT in statuses:
        print("not done yet: the same command goes on where this stretch stopped", flush=True)
    return 1 if FAILED in statuses else 2 if CUT in statuses else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python3 -m m3cp.kit", description=__doc__.splitlines()[0])
    parser.add_argument("--name", default="node", help="of the run's folder and archive")
    parser.add_argument("--out", type=Path, help="the run's folder")
    parser.add_argument("--minutes", type=float, default=STRETCH_MINUTES, help="at most so long now; the same command goes on later")
    parser.add_argument("--retry", action="store_true", help="try steps again that failed or were left out")
    parser.add_argument("--only", nargs="*", default=[], metavar="STEP", help=", ".join(s.name for s in STEPS))
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPUs where there are any; a CPU rehearses")
    parser.add_argument("--commit", help="of this code, where the copy that runs has no git history")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    given = _arguments(None)
    if given.step:
        sys.exit(run_step(given.step, given.out, given.seconds))
    try:
        sys.exit(main(given.name, given.out, given.minutes, given.retry, given.only, given.device, given.commit))
    except ValueError as problem:
        print(f"m3cp node: {problem}", file=sys.stderr)
        sys.exit(2)
