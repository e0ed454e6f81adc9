"""Many runs from one grid: notebooks by papermill, one after the other, or jobs on a cluster by submitit, side by side.

A batch holds what shares a start of workers and a pool of pages. Rows are the truth here too: what a batch measured is
read from the run's rows, never from an executed notebook or a job's exit status, and the same command goes on.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m3cp import doctor, records, sweep, watchdog
from m3cp import grid as planning
from m3cp.shapes import Point, require

NOTEBOOK = "10_sweep"
TOLD_S = 0.5  # between looks at the rows
LOOK_S = 10.0  # between questions to the cluster
LATE_S = 30.0  # that a shared file system may take to show the result of a job that the cluster no longer has
SILENT_S = 600.0  # without an answer of the cluster, after which the driver gives up
CANCEL_S = 20.0  # that an interrupted driver waits for its jobs to end
JOB_MINUTES = 60.0  # about what one cluster job measures before the next one is cut
CLUSTERS = ("slurm", "local")
COMPLETING = "COMPLETING"  # Slurm's word for a job whose processes have ended
JOBS_FOLDER = "jobs"  # submitit's, with pickled functions: only its owner may look


@dataclass(frozen=True)
class Batch:
    """One papermill run or cluster job: the notebook's parameters (or none), and the Points that they mean."""

    name: str
    parameters: Mapping[str, Any]
    points: tuple[Point, ...]


def notebook_batches(grid: Path | str, device: str, worlds: Sequence[int] | None = None) -> list[Batch]:
    """A grid of notebook parameters as papermill runs of `10_sweep`, one for each world, dtype and seed.

    Args:
        grid: a YAML or JSON file: a mapping of the notebook's axes, or a list of such mappings.
        worlds: only these numbers of ranks.

    Raises:
        ValueError: a file of Points, or axes that the notebook does not take.
    """
    axes = planning.read_axes(grid)
    found: dict[str, Batch] = {}
    for one in axes:
        planning.expand(one, device=device)  # refuses before anything starts
        full = {**planning.AXES, **one}
        refused = sorted(name for name in ("launch",) if one.get(name) is not None)
        require("grid", ", ".join(refused), not refused, f"axes that {NOTEBOOK} takes")
        for world, dtype in itertools.product(full["worlds"], full["dtypes"]):
            if worlds and world not in worlds:
                continue
            parameters = {**one, "worlds": [world], "dtypes": [dtype]}
            points = planning.expand(parameters, device=device)
            if points:
                name = f"P{world}-{dtype}-{_digest([p.to_dict() for p in points])}"
                found[name] = Batch(name, {k: v for k, v in parameters.items() if v is not None}, tuple(points))
    return list(found.values())


def cluster_batches(points: Sequence[Point], device: str, minutes: float = JOB_MINUTES) -> list[Batch]:
    """Points as cluster jobs: those that share ranks, dtype, shape and seed, cut after about so many minutes."""
    plan = planning.make_plan(points, device=device, ranks=max(p.world for p in points))
    by_start: dict[tuple, list[planning.Group]] = {}
    for group in plan.groups:
        first = group.points[0]
        by_start.setdefault((group.processes, first.dtype, repr(first.shape), first.seed), []).append(group)
    batches = []
    for (processes, dtype, _, _), groups in by_start.items():
        for cut in _cuts(groups, device, minutes * 60):
            made = tuple(dict.fromkeys(p for g in cut for p in g.record))
            batches.append(Batch(f"P{processes}-{dtype}-{_digest([p.to_dict() for p in made])}", {}, made))
    if plan.skipped:  # said once, by the job that finds out
        batches.append(Batch("skipped", {}, tuple(plan.skipped)))
    return batches


def _cuts(groups: Sequence[planning.Group], device: str, seconds: float) -> Iterator[list[planning.Group]]:
    cut: list[planning.Group] = []
    for group in groups:
        if cut and planning.plan_s([*cut, group], device) > seconds:
            yield cut
            cut = []
        cut.append(group)
    if cut:
        yield cut


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:8]


def by_notebooks(
    grid: Path | str,
    *,
    out: Path | str | None = None,
    device: str | None = None,
    worlds: Sequence[int] | None = None,
    remeasure: bool = False,
    dry_run: bool = False,
) -> int:
    """`m3cp sweep GRID --notebook`: papermill runs `10_sweep` once a batch, one bar goes over all of them.

    Returns:
        As `sweep.main`.

    Raises:
        ValueError, OSError: as `sweep.main`; papermill that is not installed.
    """
    try:
        import papermill  # noqa: F401
    except ImportError:
        raise ValueError("--notebook: papermill is not installed here; without it, `m3cp sweep GRID` measures the same") from None
    from m3cp.notebook import NotebookFailed, run_notebook

    device = doctor.sweep_device(device)
    out = (Path(out) if out else sweep.default_out(device)).resolve()
    batches = notebook_batches(grid, device, worlds)
    wanted = tuple(dict.fromkeys(p for b in batches for p in b.points))
    plan = sweep.plan_here(wanted, device, out, remeasure)
    waiting, left = [], set(plan.points)
    for batch in batches:  # a floor that several share is measured by the first
        waiting += [batch] if left & set(batch.points) else []
        left -= set(batch.points)
    print(f"{len(waiting)} papermill runs of {NOTEBOOK}.ipynb:")
    for batch in waiting:
        groups = [g for g in plan.groups if set(g.record) & set(batch.points)]
        count = sum(p in set(plan.points) for p in batch.points)
        print(f"  {batch.name}: {count} Points in {len(groups)} groups, about {planning.plan_s(groups, device) / 60:.1f} minutes")
    sweep.announce(plan, device, out)
    if dry_run:
        return sweep.print_groups(plan, device)
    with records.locked(out, patience_s=1.0):
        pass  # another driver there is found before a kernel starts
    outcome = sweep.Outcome(plan.points, out)
    with _bar(outcome, len(plan.points)):
        for batch in waiting:
            given = {**batch.parameters, "device": device, "out": str(out), "remeasure": remeasure}
            book = out / "notebooks" / f"{NOTEBOOK}.{batch.name}.ipynb"
            try:
                run_notebook(NOTEBOOK, given, book, progress=False)
            except NotebookFailed as error:
                outcome.look()
                if any(p in outcome.left for p in batch.points):  # else the rows say what failed
                    outcome.errors.append(f"{batch.name}: {' '.join(str(error).split())}")
    outcome.look()
    print(f"rows and executed notebooks: {out}")
    print("\n".join(sweep.table(outcome, len(plan.measured), plan.skipped)))
    return sweep.status(outcome, len(plan.measured), len(plan.skipped), in_time=False)


class _bar:
    """One bar over Points, moved by the rows that come while something else runs; `say` puts words behind it."""

    def __init__(self, outcome: sweep.Outcome, total: int):
        self._outcome, self._total, self._end = outcome, total, threading.Event()

    def __enter__(self) -> _bar:
        from tqdm import tqdm

        often_s = TOLD_S if sys.stderr.isatty() else 60.0  # a log keeps every line
        self._bar = tqdm(total=self._total, unit="point", mininterval=often_s, disable=not self._total)
        self.say = functools.partial(self._bar.set_postfix_str, refresh=False)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._end.wait(TOLD_S):
            self._bar.update(self._outcome.look() - self._bar.n)

    def __exit__(self, *_) -> None:
        self._end.set()
        self._thread.join()
        self._bar.update(self._outcome.look() - self._bar.n)
        self._bar.close()


def measure(points: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> int:
    """A cluster job: what `m3cp sweep` does with these Points on the node where it runs."""
    return sweep.main([Point.from_dict(dict(p)) for p in points], **options)


def on_cluster(
    cluster: str,
    grid: Path | str | None,
    *,
    out: Path | str,
    device: str,
    worlds: Sequence[int] | None = None,
    remeasure: bool = False,
    dry_run: bool = False,
    partition: str | None = None,
    job_minutes: float = JOB_MINUTES,
    slurm: Mapping[str, Any] | None = None,
    commit: str | None = None,
) -> int:
    """`m3cp sweep GRID --on slurm`: one job a batch, each with a rows file of its own in one folder that all nodes see.

    Each job leaves out what the run already holds of its node. What a job is stopped at, the same command goes on with.

    Args:
        cluster: "slurm", or "local": submitit's executor on this machine, for tests.
        out: the run's folder, on a file system that the nodes share.
        device: of the nodes, "cuda" or "cpu"; this machine may be another.
        partition: Slurm's.
        job_minutes: about how long a job measures; its time limit is twice that and ten minutes.
        slurm: further options of `sbatch`, as submitit names them, such as {"account": "..."}.

    Returns:
        As `sweep.main`.

    Raises:
        ValueError: a bad grid or option, a job that the cluster refuses (those before it are cancelled), jobs of an earlier
            driver that still run, or submitit that is not installed.
        OSError: Slurm does not answer.
        KeyboardInterrupt: SIGINT or SIGTERM, after the jobs were cancelled.
    """
    try:
        import submitit
    except ImportError:
        raise ValueError("--on: submitit is not installed here (the package's extra `cluster`)") from None
    require("--on", cluster, cluster in CLUSTERS, f"one of {', '.join(CLUSTERS)}")
    require("--device", device, device in ("cuda", "cpu"), "cuda or cpu with --on: what the nodes measure on")
    points = planning.default_grid(device, worlds or [1, 2]) if grid is None else planning.read_grid(grid, device)
    points = [p for p in points if not worlds or p.world in worlds or p.arm == "page_read"]
    out = Path(out).resolve()
    batches = cluster_batches(points, device, job_minutes)
    print(f"{len(points)} Points in {len(batches)} jobs on {cluster}; rows go to {out}")
    for batch in batches:
        plan = planning.make_plan(batch.points, device=device, ranks=max(p.world for p in batch.points))
        largest = max(map(planning.cache_bytes, batch.points))
        print(
            f"  {batch.name}: {len(batch.points)} Points, largest cache {doctor.size(largest)}, about {planning.plan_s(plan.groups, device) / 60:.1f} minutes"
        )
    if dry_run:
        return 0
    jobs_folder = out / JOBS_FOLDER
    jobs_folder.mkdir(parents=True, exist_ok=True)
    jobs_folder.chmod(0o700)
    if running := left_jobs(jobs_folder, cluster):
        how = f"scancel {' '.join(running)}" if cluster == "slurm" else f"kill -INT {' '.join(running)}"
        raise ValueError(f"{out}: jobs of an earlier driver still run: {', '.join(running)}; wait for them, or cancel them: {how}")
    held = {p for p in points if p in _held(out, set(points))} if not remeasure else set()
    try:
        executor = submitit.AutoExecutor(folder=str(jobs_folder), cluster=cluster)
    except RuntimeError as error:
        raise ValueError(f"--on {cluster}: {error}") from None
    outcome = sweep.Outcome(points, out)
    jobs: dict[str, tuple[Batch, Any]] = {}
    asked: list[int] = []  # signals are looked at between submissions: a job whose submission one cut would be nobody's
    told = {number: signal.signal(number, lambda n, _: asked.append(n)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for batch in batches:
            if asked:
                raise KeyboardInterrupt
            executor.update_parameters(**_resources(batch, cluster, device, job_minutes, partition, slurm or {}))
            options = {"out": out, "device": device, "remeasure": remeasure, "commit": commit, "rows": f"rows.{batch.name}.jsonl"}
            job = executor.submit(measure, [p.to_dict() for p in batch.points], options)
            jobs[job.job_id] = batch, job
        with _bar(outcome, len(points) - len(held)) as bar:
            dead = _wait(jobs, jobs_folder, cluster, asked, bar)
    except (KeyboardInterrupt, NameError, submitit.core.utils.FailedJobError) as error:
        left = _cancel(jobs, jobs_folder, cluster)
        ending = f", still ending: {', '.join(left)}" if left else ""
        cancelled = f"cancelled jobs {', '.join(jobs)}{ending}; the same command goes on" if jobs else "no job was submitted"
        if not isinstance(error, KeyboardInterrupt):  # an option that submitit does not know, or that sbatch refuses
            raise ValueError(f"{batch.name}: {str(error).strip().splitlines()[0]}; {cancelled}") from None
        print(f"interrupted; {cancelled}", file=sys.stderr, flush=True)
        raise
    finally:
        for number, handler in told.items():
            signal.signal(number, handler)
    outcome.look()
    skipped = {}
    for row in records.scan(out) if records.rows_files(out) else []:
        if row.point in outcome.left:
            if row.status == "skipped":
                skipped[row.point] = row.error
            elif row.status == "ok" and row.point in held:
                del outcome.left[row.point]
    for point in skipped:
        outcome.left.pop(point, None)
    for number, (batch, job) in jobs.items():
        if number in dead:
            outcome.errors.append(dead[number])
        elif (error := job.exception()) is not None or (job.result() and any(p in outcome.left for p in batch.points)):
            words = str(error) if error is not None else f"exit status {job.result()}"
            outcome.errors.append(f"{batch.name}, job {number}: {words.strip().splitlines()[-1]}")
    before = len(points) - outcome.done - len(outcome.failed) - len(outcome.left) - len(skipped)
    print(f"rows: {out}")
    print("\n".join(sweep.table(outcome, before, skipped)))
    return sweep.status(outcome, before, len(skipped), in_time=False)


def _resources(batch: Batch, cluster: str, device: str, minutes: float, partition: str | None, slurm: Mapping[str, Any]) -> dict[str, Any]:
    """What a job asks of the cluster, as submitit names it."""
    ranks = max(p.world for p in batch.points)
    given: dict[str, Any] = {"timeout_min": int(2 * minutes + 10), "name": f"m3cp-{batch.name}"}
    if cluster == "slurm":
        given |= {"nodes": 1, "tasks_per_node": 1, "cpus_per_task": ranks}
        given |= {"gpus_per_node": ranks} if device == "cuda" else {}
        given |= {"slurm_partition": partition} if partition else {}
        given |= {f"slurm_{k}": v for k, v in slurm.items()}
    return given


def _wait(jobs: Mapping[str, tuple[Batch, Any]], folder: Path, cluster: str, asked: Sequence[int], bar: _bar) -> dict[str, str]:
    """Wait until every job has left its result or is gone; those that left none, by id, in words.

    Submitit alone would wait for ever for a job that was killed, where Slurm keeps no accounts.

    Raises:
        KeyboardInterrupt: `asked` holds a signal.
        OSError: the cluster has not answered for `SILENT_S`.
    """
    from tqdm import tqdm

    dead: dict[str, str] = {}
    gone: dict[str, float] = {}
    looked, answered = float("-inf"), time.monotonic()
    while waiting := jobs.keys() - _ended(folder) - dead.keys():
        if asked:
            raise KeyboardInterrupt
        now = time.monotonic()
        if now - looked >= LOOK_S:
            looked = now
            try:
                left = left_jobs(folder, cluster)
                answered = now
                bar.say(", ".join(f"{n} job{'s' * (n > 1)} {state}" for state, n in sorted(Counter(left.values()).items())))
                gone = {number: gone.get(number, now) for number in waiting if left.get(number, COMPLETING) == COMPLETING}
            except OSError:
                if now - answered > SILENT_S:
                    raise
        for number in [n for n, since in gone.items() if n in waiting and now - since > LATE_S]:
            batch, job = jobs[number]
            said = watchdog.last_words(job.paths.stderr) if job.paths.stderr.exists() else "nothing, there is no such file"
            dead[number] = f"{batch.name}, job {number}: ended without a result; {job.paths.stderr.relative_to(folder.parent)} ends with: {said}"
            tqdm.write(f"m3cp sweep: {dead[number]}", file=sys.stderr)
        time.sleep(TOLD_S)
    return dead


def _cancel(jobs: Mapping[str, tuple[Batch, Any]], folder: Path, cluster: str) -> list[str]:
    """Cancel jobs; the ids of those that have not ended within `CANCEL_S`."""
    until = time.monotonic() + CANCEL_S
    while (left := [n for n in left_jobs(folder, cluster) if n in jobs]) and time.monotonic() < until:
        for number in left:  # again and again: a job that is starting may swallow one interrupt
            jobs[number][1].cancel(check=False)
        time.sleep(4 * TOLD_S)
    return left


def _ended(folder: Path) -> set[str]:
    """Ids of the jobs that have left a result; a listing, since a shared file system may remember that one file was not there."""
    return {path.name.removesuffix("_0_result.pkl") for path in folder.glob("*_0_result.pkl")}


def left_jobs(folder: Path, cluster: str) -> dict[str, str]:
    """The jobs that were submitted from a run's jobs folder, have left no result, and still wait or run: by id what the
    cluster says of them, such as "PENDING (Resources)".

    Raises:
        OSError: Slurm does not answer, so nobody can say.
    """
    submitted = {path.name.removesuffix("_submitted.pkl") for path in folder.glob("*_submitted.pkl")}
    without = sorted(submitted - _ended(folder), key=lambda number: (len(number), number))
    if not without:
        return {}
    if cluster == "local":
        words = f"submitit.local._local\0{folder}\0".encode()
        return {i: "RUNNING" for i in without if words in _command(i)}
    done = subprocess.run(["squeue", "-h", "--me", "-o", "%i %T %r"], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"squeue can't say whether jobs {', '.join(without)} still run: {done.stderr.strip()}")
    said = {number: (state, reason) for number, state, reason in (line.split(" ", 2) for line in done.stdout.splitlines())}
    return {i: said[i][0] + (f" ({said[i][1]})" if said[i][0] == "PENDING" else "") for i in without if i in said}


def _command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _held(out: Path, wanted: set[Point]) -> set[Point]:
    """Wanted Points with a timed row of this code on whatever node."""
    code = records.code_hash()
    rows = records.scan(out) if records.rows_files(out) else []
    return {r.point for r in rows if r.point in wanted and r.status == "ok" and r.provenance.get("code_hash") == code}
