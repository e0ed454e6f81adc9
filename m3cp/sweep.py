"""From a grid to rows on disk: the driver of a sweep on one machine.

Rows are the truth: a Point that this node has measured with this code and these versions is not measured again, so the
same command goes on where an earlier one stopped, however that ended. One driver holds a rows file; its ranks
(`m3cp.ranks`, `m3cp.worker`) die with it. `python3 -m m3cp.sweep --help` needs neither typer nor pydantic.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from m3cp import compiled, doctor, ranks, records, traffic, trust
from m3cp import grid as planning
from m3cp.grid import Group, Plan
from m3cp.ranks import WorkersFailed, launch
from m3cp.shapes import Point, require, require_int

ROOT = records.PACKAGE.parent
WORKER = "m3cp.ranks"  # the module that every rank runs
STARTS = 3  # of workers that end before their first group; after that the Points of so many ranks are given up
COMPILE_S = 150.0  # at most, for kernels that are compiled before the ranks start
SHOWN = 20  # Points that a table names
MOST_PROCESSES = 100  # fresh starts that one command may ask for
FAILED, NOT_MEASURED = 1, 2  # exit statuses beside 0: a Point failed or was not reached; nothing could be measured


def node_name(device: str, gpus: Sequence[doctor.Device], host: doctor.Cpu) -> str:
    """The machine's hardware as rows name it: "2x NVIDIA H200", "cpu: <model>"."""
    return f"{len(gpus)}x {gpus[0].name}" if device == "cuda" else f"cpu: {host.model}"


def job_facts(device: str) -> dict[str, Any]:
    """What every worker job says of this machine."""
    gpus, host = doctor.devices() if device == "cuda" else (), doctor.cpu()
    return {
        "device": device,
        "node": node_name(device, gpus, host),
        "devices": [{"name": d.name, "l2_bytes": d.l2_bytes, "last_level_bytes": d.last_level_bytes} for d in gpus],
        "cpu_last_level_bytes": host.last_level_bytes,
    }


def default_out(device: str) -> Path:
    """Where a run of this machine goes when nobody says: one folder a machine, so that a later sweep goes on there."""
    gpus = doctor.devices() if device == "cuda" else ()
    name = "cpu" if device == "cpu" else f"{len(gpus)}x-{gpus[0].name}".lower().replace(" ", "-")
    return ROOT / "data" / "runs" / name


def in_subprocess(
    points: Sequence[Point],
    *,
    device: str | None = None,
    out: Path | str | None = None,
    remeasure: bool = False,
    processes: int = 1,
    minutes: float | None = None,
) -> list[records.Row]:
    """Sweep in a process of its own, as notebooks do: a stuck rank can't wedge the caller, who sees a bar of rows.

    Args:
        points: what to measure; what the run already holds is not measured again.
        device, out, remeasure, processes, minutes: as `main` takes them.

    Returns:
        The newest row of each Point, failed and skipped ones included; Points that were not reached have none.

    Raises:
        WorkersFailed: the process ended without measuring anything; with its last words.
    """
    from tqdm import tqdm

    out = Path(out) if out else default_out(doctor.sweep_device(device))
    wanted = set(points)
    rows_wanted = len(wanted) * processes
    with tempfile.TemporaryDirectory(prefix="m3cp-") as folder:
        grid, log = Path(folder) / "points.json", Path(folder) / "log"
        grid.write_text(json.dumps([p.to_dict() for p in points]))
        command = [sys.executable, "-m", "m3cp.sweep", str(grid), "--out", str(out)]
        command += [*(["--device", device] if device else []), *(["--remeasure"] if remeasure else [])]
        command += ["--processes", str(processes), *(["--minutes", str(minutes)] if minutes else [])]
        grown = records.Growth(out)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
        with open(log, "wb") as file, tqdm(total=rows_wanted, unit="point", mininterval=0.5) as bar:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=env,
                preexec_fn=functools.partial(ranks.die_with_parent, os.getpid()),
            )  # fmt: skip
            try:
                while process.poll() is None:
                    bar.update(min(grown.look(), rows_wanted) - bar.n)
                    time.sleep(0.3)
            finally:
                if process.poll() is None:
                    process.kill()
                process.wait()
            code = records.code_hash()
            found = {
                (r.point, r.process): r
                for r in (records.scan(out) if records.rows_files(out) else [])
                if r.point in wanted and (r.status == "skipped" or r.provenance.get("code_hash") == code)
            }
            newest = {point: row for (point, _), row in found.items()}
            lost = rows_wanted - len(found) - sum((processes - 1) for row in newest.values() if row.status == "skipped")
            bar.update(rows_wanted - lost - bar.n)
        said = [line for line in log.read_text(errors="replace").splitlines() if line.strip() and "point/s" not in line]
        print("\n".join(said))
        missing = len(wanted) - len(newest)
        if lost > missing:
            print(f"{lost} of {rows_wanted} rows were not reached: {processes} processes of {len(wanted)} Points")
        if process.returncode not in (0, FAILED) or (missing and not minutes):
            words = said[-1] if said else "it said nothing"
            raise WorkersFailed(
                f"the sweep ended with exit status {process.returncode}, {missing} Points have no row: {words}"
            )
    return [newest[p] for p in points if p in newest]


def summary(points: Sequence[Point], rows: Sequence[records.Row]):
    """A table for people, one line a Point: medians, floors, checks, and failures and skips in words."""
    import pandas

    by_point = {row.point: row for row in rows}
    lines = []
    for point in points:
        row = by_point.get(point)
        ok = row is not None and row.status == "ok"
        lines.append(
            {
                "point": point.label,
                "status": "not reached" if row is None else row.status,
                "median_us": row.median_us if ok else None,
                "page_read_us": row.page_read_us if ok else None,
                "limit_us": row.limit_us if ok else None,
                "cache": row.cache_state if ok else None,
                "checked rows": row.check["rows"] if ok else None,
                "in words": (row.error or ("unsteady" if row.unsteady else "")) if row else "the time was up",
            }
        )
    return pandas.DataFrame.from_records(lines).set_index("point")


def require_complete(points: Sequence[Point], rows: Sequence[records.Row]) -> None:
    """Raise unless every Point was measured or skipped for a reason, and something was measured.

    Raises:
        WorkersFailed: naming the Points that failed or were not reached.
    """
    by_point = {row.point: row for row in rows}
    failed = [f"{p.label}: {by_point[p].error}" for p in points if p in by_point and by_point[p].status == "failed"]
    missing = [f"{p.label}: not reached" for p in points if p not in by_point]
    if failed or missing:
        raise WorkersFailed(
            f"{len(failed)} Points failed, {len(missing)} were not reached: {'; '.join([*failed, *missing])}"
        )
    if not any(row.status == "ok" for row in rows):
        raise WorkersFailed(f"nothing was measured: {'; '.join(sorted({row.error for row in rows})) or 'no Points'}")


def git_state(commit: str | None = None) -> dict[str, Any]:
    """`commit` (or HEAD's, or "unknown") and whether what measures differs from it (None where nobody can say)."""
    if commit is None:
        try:
            done = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=20)
            commit = done.stdout.strip() if done.returncode == 0 else None
        except (OSError, subprocess.TimeoutExpired):
            commit = None
    committed = records.committed_hash(commit or "")
    return {"commit": commit or "unknown", "dirty": None if committed is None else committed != records.code_hash()}


def main(
    grid: Any = None,
    quick: bool = False,
    out: Path | str | None = None,
    device: str | None = None,
    worlds: Sequence[int] | None = None,
    remeasure: bool = False,
    processes: int = 1,
    dry_run: bool = False,
    minutes: float | None = None,
    commit: str | None = None,
    rows: str = records.ROWS_FILE,
    ahead: bool = True,
) -> int:
    """Measure a grid on this machine and append its rows to a run.

    Args:
        grid: as `read_grid` takes it; None is `default_grid`.
        quick: a small warm grid, under a minute.
        out: the run's folder; None is one a machine, under data/runs.
        device: "cuda", "cpu" or None for what the machine has.
        worlds: numbers of ranks; only these of a given grid. None is 1, 2, 4, 8 as far as the machine goes.
        remeasure: measure Points again that the run already holds.
        processes: measure every Point in so many fresh starts of the ranks, one start after the other over the whole grid:
            what a process draws anew (placement, the collectives' channels) moves a time by more than its rounds show.
        dry_run: print Points and an estimate, and measure nothing.
        minutes: stop cleanly after so long; what remains is listed.
        commit: of this code, where the copy that runs has no git history.
        rows: the rows file in that folder; drivers that measure for one run at a time have one each.
        ahead: on GPUs: compile the fused forms' kernels side by side first, which ranks would do one after another.

    Returns:
        0; 1 when a Point failed or was not reached; 2 when nothing could be measured.

    Raises:
        doctor.NodeError: a machine that can't measure what was asked.
        ValueError: a bad grid or option, another driver on the rows file, or a run whose rows can't be read.
        OSError: rows can't be written.
    """
    began = time.monotonic()
    device = doctor.sweep_device(device)
    require("minutes", minutes, minutes is None or minutes > 0, "a positive number of minutes")
    require_int("processes", processes, 1, MOST_PROCESSES)
    facts = job_facts(device)
    host = doctor.cpu()
    count = len(facts["devices"]) if device == "cuda" else host.cores
    here = [w for w in doctor.WORLDS if doctor.skip_reason(w, device, gpus=count, cores=count) is None and w <= 8]
    worlds = list(worlds) if worlds else None
    if grid is None:
        reached = device != "cuda" or not doctor.unreachable_peers(max(here))
        if not reached:
            print("GPUs here do not all reach each other's memory: the staged form only (`m3cp doctor` names the pairs)")
        points = planning.default_grid(device, worlds or (here if device == "cuda" else here[:2]), quick, reached)
    else:
        points = [p for p in planning.read_grid(grid, device) if not worlds or p.world in worlds or p.arm == "page_read"]
    out = Path(out) if out is not None else default_out(device)
    provenance = {**doctor.provenance(), "code_hash": records.code_hash(), **git_state(commit)}
    provenance["command"] = "m3cp sweep" if grid is None else "m3cp sweep GRID"
    if dry_run:
        for process in range(processes):
            if processes > 1:
                print(f"process {process + 1} of {processes}:")
            plan = plan_here(points, device, out, remeasure, process)
            announce(plan, device, out)
            print_groups(plan, device)
        return 0
    deadline, statuses = None if minutes is None else began + minutes * 60, []
    with records.locked(out / rows) as held:
        for process in range(processes):
            if process and deadline is not None and time.monotonic() > deadline:
                print(f"{processes - process} of {processes} processes not reached")
                break
            if processes > 1:
                print(f"process {process + 1} of {processes}:", flush=True)
            known, said = _known(out, set(points), facts["node"], provenance, process)
            known = set() if remeasure else known
            unknown = [p for p in points if p not in known]
            refused = trust.refusals(unknown, facts["node"], count, out) if device == "cuda" else {}
            plan = _plan([p for p in points if p not in refused], device, known)
            plan.skipped |= refused
            announce(plan, device, out)
            if device == "cuda" and ahead:
                limit_s = COMPILE_S if minutes is None else min(COMPILE_S, 30 * minutes)  # half of the time that was given
                for problem in compiled.ahead(plan.points, limit_s)[1]:
                    print(f"not compiled ahead: {problem}")
            new = {p: reason for p, reason in plan.skipped.items() if p not in said}
            if new:
                records.append(out / rows, *(records.Row(p, "skipped", p.arm, facts["node"], 0, error=reason) for p, reason in new.items()))
            outcome = Outcome(plan.points, out / rows)
            again = {"process": process} if process else {}
            job = {**facts, "out": str(out / rows), "provenance": provenance | again}
            _measure(plan, outcome, job, deadline, held)
            print(f"rows: {_near(out / rows)}")
            print("\n".join(table(outcome, len(plan.measured), plan.skipped)))
            statuses.append(status(outcome, len(plan.measured), len(plan.skipped), in_time=minutes is not None))
    return FAILED if FAILED in statuses else min(statuses)


def plan_here(points: Sequence[Point], device: str, out: Path, remeasure: bool, process: int = 0) -> Plan:
    """What this machine would do now for a run: what it can't measure is skipped, what the run holds left out."""
    provenance = {"code_hash": records.code_hash(), "versions": doctor.versions()}
    known, _ = _known(out, set(points), job_facts(device)["node"], provenance, process)
    return _plan(points, device, set() if remeasure else known)


def _plan(points: Sequence[Point], device: str, known: set[Point]) -> Plan:
    gpus = doctor.devices() if device == "cuda" else ()
    return planning.make_plan(
        points, device=device, ranks=len(gpus) if device == "cuda" else doctor.cpu().cores, known=known,
        memory_bytes=gpus[0].memory_bytes if gpus else None,
    )  # fmt: skip


def print_groups(plan: Plan, device: str) -> int:
    """Print each group's time, memory, ranks and Points; 0, the exit status of having said so."""
    for group in plan.groups:
        memory = doctor.size(planning.cache_bytes(group.points[0]))
        names = "; ".join(p.label for p in group.record)
        print(f"  {planning.estimate_s(group, device):6.1f} s  {memory:>8}  {group.processes} ranks  {names}")
    return 0


def _known(out: Path, wanted: set[Point], node: str, provenance: Mapping[str, Any], process: int = 0) -> tuple[set[Point], set[Point]]:
    """Of the wanted Points: those that the run holds of this repeat, and those that it has skipped before."""
    said: set[Point] = set()

    def rows() -> Iterable[records.Row]:
        for row in records.scan(out):
            if row.point in wanted:
                if row.status == "skipped":
                    said.add(row.point)
                yield row

    if not records.rows_files(out):
        return set(), said
    return records.measured(rows(), provenance["code_hash"], node, provenance["versions"], process), said


class Outcome:
    """What became of the Points of a sweep, read from the rows as they come.

    Args:
        points: that are to be measured.
        run: a rows file, or a run's folder: rows that are there already do not count.
    """

    def __init__(self, points: Iterable[Point], run: Path):
        self.left = dict.fromkeys(points)
        self.done = self.unsteady = 0
        self.failed: dict[Point, str] = {}
        self.errors: list[str] = []  # of what ended before it could say which Point
        self._run, self._at = run, {path: path.stat().st_size for path in records.rows_files(run)}

    def look(self) -> int:
        """Read what is new; how many of the Points have a row now."""
        for path in records.rows_files(self._run):
            with open(path, "rb") as file:
                file.seek(self._at.get(path, 0))
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._at[path] = self._at.get(path, 0) + len(line)
                    self._count(records.Row.from_dict(json.loads(line)))
        return self.done + len(self.failed)

    def _count(self, row: records.Row) -> None:
        if row.point not in self.left or row.status == "skipped":
            return
        del self.left[row.point]
        if row.status == "failed":
            self.failed[row.point] = row.error
        else:
            self.done, self.unsteady = self.done + 1, self.unsteady + row.unsteady


def table(outcome: Outcome, before: int, skipped: Mapping[Point, str]) -> list[str]:
    """Lines for people: Points measured, there already, failed (with their error), not applicable here, not reached."""
    reasons = Counter(skipped.values())
    lines = [f"{outcome.done:>6} Points measured" + (f", {outcome.unsteady} of them unsteady: the page-read probe moved by more than 3% around them" if outcome.unsteady else "")]
    lines += [f"{before:>6} there already"]
    lines += [f"{len(outcome.failed):>6} failed", *(f"         {p.label}: {_first_line(e)}" for p, e in outcome.failed.items())]
    lines += [f"{len(skipped):>6} not applicable here", *(f"         {n}: {reason}" for reason, n in reasons.items())]
    lines += [f"{len(outcome.left):>6} not reached", *(f"         {p.label}" for p in list(outcome.left)[:SHOWN])]
    lines += [f"         and {len(outcome.left) - SHOWN} more"] * (len(outcome.left) > SHOWN)
    return lines + [f"         {_first_line(error)}" for error in outcome.errors]


def status(outcome: Outcome, before: int, skipped: int, in_time: bool) -> int:
    """0; `FAILED` when a Point failed or, unless a time was set, was not reached; `NOT_MEASURED` when there is nothing."""
    if outcome.failed or outcome.errors:
        return FAILED
    if not (outcome.done or before or skipped):
        return NOT_MEASURED
    return FAILED if outcome.left and not in_time else 0


def _first_line(text: str) -> str:
    return text.splitlines()[0][:300] if text else "no word"


def _measure(plan: Plan, outcome: Outcome, job: dict[str, Any], deadline: float | None, held: int) -> None:
    """Run all groups, those of as many ranks in one start of workers. After a group that ended its workers its Points
    are tried one by one, so that the one at fault is found and the rest is measured; then the sweep goes on."""
    from tqdm import tqdm

    with tqdm(total=len(plan.points), unit="point", mininterval=0.5, disable=not plan.points) as bar:
        for processes in sorted({g.processes for g in plan.groups}):
            waiting = [([g for g in plan.groups if g.processes == processes], "")]
            starts = 0
            while waiting:
                groups, alone = waiting.pop(0)
                left_s = None if deadline is None else deadline - time.monotonic()
                if left_s is not None and left_s <= 0:
                    break
                progress = _Progress(bar, outcome)
                provenance = job["provenance"] | ({"alone_after": alone} if alone else {})
                try:
                    launch(
                        WORKER, {**job, "provenance": provenance, "seconds": left_s, "groups": [_as_json(g) for g in groups]},
                        processes, follow=progress.look, limit_s=None if left_s is None else left_s + 120, keep=[held],
                    )  # fmt: skip
                    continue
                except WorkersFailed as failure:
                    error = str(failure)[:800]
                if records.CannotWrite.__name__ in error:
                    raise OSError(error)
                if progress.current is None:
                    starts += 1
                    tqdm.write(f"m3cp sweep: {processes} ranks did not start: {error}", file=sys.stderr)
                    if starts < STARTS:
                        waiting.insert(0, (groups, alone))
                        continue
                    outcome.errors.append(f"{processes} ranks ended {starts} times before their first Point: {error}")
                    break
                starts, rest = 0, _unmeasured(groups[progress.current + 1 :], outcome)
                lost = [p for p in groups[progress.current].record if p in outcome.left]
                for point in lost:
                    tqdm.write(f"m3cp sweep: {point.label}: {error}", file=sys.stderr)
                if rest:
                    waiting.insert(0, (rest, alone))
                if len(groups[progress.current].points) > 1 and not alone:
                    singles = [_by_itself(p, processes) for p in lost]
                    waiting[:0] = [(singles, error)] if singles else []
                    continue
                for point in lost:
                    row = records.Row(point, "failed", point.arm, job["node"], processes, error=error, provenance=provenance)
                    records.append(job["out"], row)
                progress.count()


def _unmeasured(groups: Sequence[Group], outcome: Outcome) -> list[Group]:
    """What is left of groups."""
    left = [replace(g, record=tuple(p for p in g.record if p in outcome.left)) for g in groups]
    return [g for g in left if g.record]


def _by_itself(point: Point, processes: int) -> Group:
    floor = traffic.floor_point(point) if point.arm != "page_read" else point
    return Group(processes, tuple(dict.fromkeys([floor, point])), (point,))


def _as_json(group: Group) -> dict[str, Any]:
    return {"points": [p.to_dict() for p in group.points], "record": [p in group.record for p in group.points]}


class _Progress:
    """Moves a bar as rows come, and keeps which group rank 0 is at."""

    def __init__(self, bar, outcome: Outcome):
        self.current: int | None = None
        self._bar, self._outcome = bar, outcome

    def look(self, scratch: Path) -> None:
        with contextlib.suppress(OSError, ValueError):
            at = json.loads((scratch / "progress.json").read_text())
            self.current = at["current"]
            self._bar.set_postfix_str(at["label"], refresh=False)
        self.count()

    def count(self) -> None:
        """Read the new rows."""
        self._bar.update(self._outcome.look() - self._bar.n)


def announce(plan: Plan, device: str, out: Path) -> None:
    """Say what will be measured, about how long that takes, what is there already and what is skipped, and why."""
    seconds = planning.plan_s(plan.groups, device)
    largest = max(map(planning.cache_bytes, plan.points), default=0)
    print(
        f"{len(plan.points)} Points to measure in {len(plan.groups)} groups, about {seconds / 60:.1f} minutes; largest cache {doctor.size(largest)}; rows go to {_near(out)}"
    )
    if plan.measured:
        print(f"{len(plan.measured)} Points are there already (`--remeasure` measures them again)")
    for reason, count in Counter(plan.skipped.values()).items():
        print(f"{count} Points skipped: {reason}")


def _near(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _arguments(argv: Sequence[str] | None):
    import argparse

    parser = argparse.ArgumentParser(
        prog="python3 -m m3cp.sweep", description="Measure a grid of Points on this machine."
    )
    parser.add_argument(
        "grid",
        nargs="?",
        help="a YAML or JSON file of axes, or a JSON list of Points; default: a grid for this machine",
    )
    parser.add_argument("--quick", action="store_true", help="a small warm grid, under a minute")
    parser.add_argument("--out", type=Path, help="the run's folder")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPUs where there are any")
    parser.add_argument(
        "--world",
        type=lambda text: [int(w) for w in text.split(",")],
        dest="worlds",
        metavar="1,2",
        help="numbers of ranks",
    )
    parser.add_argument("--remeasure", action="store_true", help="measure Points again that the run already holds")
    parser.add_argument("--processes", type=int, default=1, help="measure every Point in so many fresh starts of the ranks")
    parser.add_argument("--dry-run", action="store_true", help="print Points and an estimate")
    parser.add_argument("--minutes", type=float, help="stop cleanly after so long")
    parser.add_argument("--commit", help="of this code, where the copy that runs has no git history")
    return parser.parse_args(argv)


if __name__ == "__main__":
    try:
        sys.exit(main(**vars(_arguments(None))))
    except (doctor.NodeError, ValueError, OSError) as problem:
        print(f"m3cp sweep: {problem}", file=sys.stderr)
        sys.exit(NOT_MEASURED)

