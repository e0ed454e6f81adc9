"""From a grid to rows on disk: expand it into Points, start one worker process a rank, see that they end.

Workers (`m3cp.worker`) are started by path, die with this process, and are all ended when one of them fails or
nothing moves any more. Points that a run already holds are skipped, so a sweep that was cut short goes on where it
stopped. `python3 -m m3cp.sweep --help` needs neither typer nor pydantic.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from m3cp import doctor, records, traffic
from m3cp.shapes import ARM_FIELDS, IndexerShape, Point, require

ROOT = records.PACKAGE.parent
STALL_S = 240.0  # without a sign of life; compiling every kernel takes less than a minute
RESTARTS = 2  # after a group that ended its workers, the groups behind it still run
FAILED, NOT_MEASURED = 1, 2  # exit statuses beside 0: a Point failed; nothing could be measured
# Axes of a grid, with what they are when a grid does not say. The defaults of an axis that names arms' own fields hold
# only for arms that use the field.
AXES: dict[str, Any] = {
    "contexts": [1024, 8192, 32768, 131072, 524288],
    "batches": [1, 8, 32, 64],
    "worlds": [1, 2],
    "arms": ["tp", "cp", "page_read"],
    "mixes": ["uniform"],
    "query_lens": [1],
    "dtypes": ["bf16"],
    "forms": ["staged"],
    "exchanges": ["collective"],
    "queries": ["gathered", "replicated"],
    "cache": "cold",
    "launch": None,
    "max_context": None,
    "rows_padded": 0,
    "shared_prefix_tokens": 0,
    "seed": 0,
}
# What the default grid adds on GPUs: ragged batches and speculative verification (context, batch, mix, query_len).
EXTRA_SHAPES = (
    (131072, 8, "one_long_rest_1k", 1),
    (131072, 32, "one_long_rest_1k", 1),
    (131072, 32, "log_uniform", 1),
    (8192, 8, "uniform", 4),
    (32768, 32, "uniform", 4),
    (131072, 8, "uniform", 4),
)


@dataclass(frozen=True)
class Group:
    """Arms over the same inputs, timed in alternating rounds by `processes` ranks.

    Args:
        points: all that are timed, floors first.
        record: those of them that become rows.
    """

    processes: int
    points: tuple[Point, ...]
    record: tuple[Point, ...]


@dataclass
class Plan:
    """What a sweep will do: groups to run, Points to skip and why, Points that the run already holds."""

    groups: list[Group] = field(default_factory=list)
    skipped: dict[Point, str] = field(default_factory=dict)
    measured: list[Point] = field(default_factory=list)

    @property
    def points(self) -> list[Point]:
        """Points that will be measured."""
        return [p for g in self.groups for p in g.record]


class WorkersFailed(RuntimeError):
    """A rank raised, died or stalled; the message names it."""


def expand(grid: Mapping[str, Any], *, device: str, shape: IndexerShape | None = None) -> list[Point]:
    """The Points of a grid: every combination of its axes, each arm with the fields that it uses.

    Args:
        grid: some of `AXES`; a name outside them is an error.
        device: "cuda" or "cpu": decides how calls are launched where the grid does not say.

    Raises:
        ValueError: an unknown axis, or values that a Point refuses.
    """
    unknown = sorted(set(grid) - set(AXES))
    if unknown:
        raise ValueError(f"grid has {', '.join(unknown)}: allowed are {', '.join(AXES)}")
    axes = {**AXES, **{k: v for k, v in grid.items() if v is not None}}
    for name, value in axes.items():
        if isinstance(AXES[name], list):
            require(name, value, isinstance(value, (list, tuple)) and len(value) > 0, "a list with at least one value")
    for arm in axes["arms"]:
        require("arms", arm, arm in ARM_FIELDS, f"among {', '.join(ARM_FIELDS)}")
    common = {
        "max_context": axes["max_context"] or max(axes["contexts"]),
        "cache": axes["cache"],
        "launch": axes["launch"] or ("graph" if device == "cuda" else "eager"),
        "rows_padded": axes["rows_padded"],
        "shared_prefix_tokens": axes["shared_prefix_tokens"],
        "seed": axes["seed"],
        "shape": shape or IndexerShape(),
    }
    points: dict[Point, None] = {}
    cells = itertools.product(
        axes["worlds"], axes["mixes"], axes["dtypes"], axes["query_lens"], axes["contexts"], axes["batches"]
    )
    for world, mix, dtype, query_len, context, batch in cells:
        if mix != "uniform" and batch == 1:
            continue  # one request has no mix
        cell = dict(
            context_tokens=context, batch=batch, mix=mix, dtype=dtype, query_len=query_len, world=world, **common
        )
        made = [p for arm in axes["arms"] if arm != "page_read" for p in _arm_points(arm, cell, axes)]
        if "page_read" in axes["arms"]:
            floors = [traffic.floor_point(p) for p in made] or [Point(arm="page_read", **cell)]
            made = [*floors, *made]
        points.update(dict.fromkeys(made))
    return list(points)


def _arm_points(arm: str, cell: Mapping[str, Any], axes: Mapping[str, Any]) -> list[Point]:
    if cell["world"] == 1 and arm != "tp" and not arm.endswith("_tp"):
        return []  # one rank has nobody to share with
    choices = [
        axes[axis] if name in ARM_FIELDS[arm] else [None]
        for name, axis in (("form", "forms"), ("exchange", "exchanges"), ("queries", "queries"))
    ]
    made = []
    for form, exchange, queries in itertools.product(*choices):
        if form in ("two_launch", "one_launch") and exchange == "collective":
            continue  # only the symmetric exchange carries these forms
        if arm == "cp_local" and form != "staged":
            continue  # the other forms have no part without an exchange
        if arm in ("vllm_cp", "sglang_cp") and queries == "replicated":
            continue  # the engines gather them
        made.append(Point(arm=arm, form=form, exchange=exchange, queries=queries, **cell))
    return made


def default_grid(device: str, worlds: Sequence[int], quick: bool = False, peers: bool = True) -> list[Point]:
    """What a sweep measures when no grid is given, for a machine that runs up to `max(worlds)` ranks.

    On GPUs about 150 Points for worlds up to 2: the one-launch form over contexts and batches at the largest world,
    ragged batches and speculative verification at three shapes, the staged form over the process group and the other
    worlds at a few. On a CPU contexts and batches around the break-even, some minutes in all.

    Args:
        peers: whether GPUs reach each other's memory; without, the staged form takes the one-launch form's place.
    """
    worlds = sorted(set(worlds))
    top = worlds[-1]
    if device == "cpu":
        arms = ["tp", "cp", "page_read"]
        if quick:
            small = {"contexts": [1024, 4096], "batches": [1, 2], "max_context": 4096, "cache": "warm"}
            return expand({**small, "worlds": worlds, "arms": [*arms, "cp_local"]}, device=device)
        cells = {"contexts": [1024, 3072, 4096, 8192, 16384], "batches": [1, 4, 16], "max_context": 16384}
        ends = {**cells, "batches": [1, 16]}
        points = dict.fromkeys(expand({**cells, "worlds": [top], "arms": arms}, device=device))
        points.update(dict.fromkeys(expand({**ends, "worlds": [top], "arms": ["cp_local"]}, device=device)))
        for world in worlds[:-1]:
            points.update(dict.fromkeys(expand({**ends, "worlds": [world], "arms": arms}, device=device)))
        return list(points)
    arms = ["tp", "cp", "page_read"]
    staged = {"forms": ["staged"], "exchanges": ["collective"]}
    fast = {"forms": ["one_launch"], "exchanges": ["symmetric"]} if peers else staged
    points: dict[Point, None] = {}

    def add(grid: Mapping[str, Any]) -> None:
        points.update(dict.fromkeys(expand({**grid, "max_context": 524288}, device=device)))

    if quick:
        small = {"contexts": [1024, 8192, 32768], "batches": [1, 8], "cache": "warm", "worlds": worlds}
        add({**small, **fast, "arms": arms})
        add({**small, **staged, "arms": [*arms, "cp_local"]})
        return list(points)
    cells = {"contexts": AXES["contexts"], "batches": AXES["batches"]}
    few = {"contexts": [8192, 131072], "batches": [1, 32]}
    if top == 1:  # one GPU: CP's part without the exchange, for the worlds that a node may have
        arms, extra_world = ["tp", "cp_local", "page_read"], 2
        add({**cells, **fast, "worlds": [1], "arms": ["tp", "page_read"]})
        add({**cells, **staged, "worlds": [2], "arms": arms})
        add({**cells, **staged, "batches": [32], "worlds": [8], "arms": arms})
        fast = staged
    else:
        extra_world = top
        add({**cells, **fast, "worlds": [top], "arms": arms})
        for world in worlds:
            add({**few, **staged, "worlds": [world], "arms": [*arms, "cp_local"]})
            add({**few, **fast, "worlds": [world], "arms": arms})
    for context, batch, mix, query_len in EXTRA_SHAPES:
        one = {"contexts": [context], "batches": [batch], "mixes": [mix], "query_lens": [query_len]}
        add({**one, **fast, "worlds": [extra_world], "arms": arms})
    return list(points)


def read_grid(source: Mapping[str, Any] | Sequence[Any] | str | Path, device: str) -> list[Point]:
    """Points of a grid: a mapping of axes, a list of such mappings, of Points or of their dicts, or a file of either.

    Files are YAML or JSON; `data/grids/` holds the grids of recorded runs.

    Raises:
        ValueError: a file that is neither, or what `expand` refuses.
    """
    if isinstance(source, (str, Path)):
        text = Path(source).read_text()
        if Path(source).suffix == ".json":
            source = json.loads(text)
        else:
            try:
                import yaml
            except ImportError:
                raise ValueError(
                    f"grid={str(source)!r}: PyYAML is not installed here; give the grid as a .json file"
                ) from None
            source = yaml.safe_load(text)
    if isinstance(source, Mapping):
        return expand(source, device=device)
    if not isinstance(source, Sequence):
        raise ValueError(f"grid={source!r}: must be a mapping of axes, or a list of such mappings or of Points")
    points: dict[Point, None] = {}
    for item in source:
        is_point = isinstance(item, Point) or "context_tokens" in item
        made = [item if isinstance(item, Point) else Point.from_dict(item)] if is_point else expand(item, device=device)
        points.update(dict.fromkeys(made))
    return list(points)


def make_plan(
    points: Iterable[Point],
    *,
    device: str,
    ranks: int,
    known: set[Point] = frozenset(),
    memory_bytes: int | None = None,
) -> Plan:
    """Group Points by inputs and processes; skip in words what this machine can't run.

    `cp` and the engines' CP need a process a rank. The others meet no peer, so where there are too few devices for their world, one
    process stands for one rank of it.

    Args:
        device: "cuda" or "cpu".
        ranks: devices (or cores) that can each hold a rank.
        known: Points that the run already holds.
        memory_bytes: of one device, for caches that can't fit; None does not ask.
    """
    plan = Plan()
    cells: dict[tuple, list[Point]] = {}
    floors: list[Point] = []
    for point in dict.fromkeys(points):
        reason = _skip_reason(point, device, ranks, memory_bytes)
        if reason:
            plan.skipped[point] = reason
        elif point in known:
            plan.measured.append(point)
        elif point.arm == "page_read":
            floors.append(point)
        else:
            processes = point.world if point.world <= ranks else 1
            cells.setdefault((processes, _inputs_of(point), point.world), []).append(point)
    waiting = dict.fromkeys(floors)
    for (processes, _, _), arms in cells.items():
        beneath = list(dict.fromkeys(traffic.floor_point(p) for p in arms))
        record = [p for p in beneath if p in waiting]
        for p in record:
            del waiting[p]
        plan.groups.append(Group(processes, (*beneath, *arms), (*record, *arms)))
    for point in waiting:
        plan.groups.append(Group(point.world if point.world <= ranks else 1, (point,), (point,)))
    plan.groups.sort(
        key=lambda g: (g.processes, g.points[0].seed, g.points[0].dtype, repr(g.points[0].shape))
    )  # one pool after the other
    return plan


def _inputs_of(point: Point) -> Point:
    """The Point without what its arm adds: equal for arms over the same inputs."""
    return replace(point, arm="page_read", form=None, exchange=None, queries=None, threshold_blocks=None)


def _skip_reason(point: Point, device: str, ranks: int, memory_bytes: int | None) -> str | None:
    if point.arm not in ("tp", "cp", "cp_local", "page_read"):
        from m3cp import engine_kernels  # torch, which a plan of our own arms does without

        reason = engine_kernels.refusal(point)
        if reason is None and device == "cpu":
            reason = f"arm {point.arm!r}: an engine's kernels need a GPU"
        if reason is None and engine_kernels.missing(point.arm):
            reason = f"arm {point.arm!r}: its kernels are not importable here: {engine_kernels.missing(point.arm)}"
        if reason:
            return reason
    if point.launch == "graph" and device == "cpu":
        return "launch='graph': a CPU has no graphs"
    if point.shape.heads % point.world and point.world % point.shape.heads:
        return f"world={point.world} does not fit {point.shape.heads} heads"
    if point.arm in ("cp", "vllm_cp", "sglang_cp"):
        if point.world == 1:
            return "world=1: one rank has nobody to share with"
        reason = doctor.skip_reason(point.world, device, gpus=ranks, cores=ranks)
        if reason:
            return reason
    need = sum(point.shape.blocks(n) for n in traffic.context_lengths(point)) * point.shape.key_bytes(point.dtype)
    if memory_bytes and need > memory_bytes * 0.6:
        return f"its cache of {doctor.size(need)} does not fit a device of {doctor.size(memory_bytes)}"
    return None


def estimate_s(group: Group, device: str) -> float:
    """About how long a group takes, seconds: from bytes and blocks, generously rounded; for people, not for counts."""
    total = 0.0
    for point in group.points:
        blocks = traffic.bytes_read(point) / point.shape.key_bytes(point.dtype)
        if device == "cuda":
            total += 0.5 + 300 * (20 + 0.008 * blocks) / 1e6
            total += 3.0 if point.arm.startswith("vllm") else 0.0  # its launch settings are tried too
            continue
        us = 10 * blocks if point.arm == "page_read" else 2000 + 90 * blocks
        calls = 1 if point.cache == "warm" else max(2.0, min(256.0, 2 * 2**25 / max(1, 2**15 * blocks / point.world)))
        total += us * calls * 6 / 1e6
    return total


def launch(
    module: str,
    job: dict[str, Any],
    processes: int,
    *,
    follow: Callable[[Path], None] = lambda scratch: None,
    stall_s: float = STALL_S,
    limit_s: float | None = None,
) -> None:
    """Start `python -m MODULE JOB` once a rank and wait for all; none is left when this returns or raises.

    Args:
        module: a worker module, or the path of a Python file, that ends in `m3cp.worker.run`.
        job: plain JSON; `scratch` is added to it.
        processes: ranks.
        follow: called about ten times a second with the scratch folder.
        stall_s: seconds without a sign of life after which the workers are ended.
        limit_s: seconds after which the workers are ended whatever they do.

    Raises:
        WorkersFailed: naming the rank, and what it said.
    """
    with tempfile.TemporaryDirectory(prefix="m3cp-") as folder:
        scratch = Path(folder)
        (scratch / "job.json").write_text(json.dumps({**job, "scratch": folder}))
        (scratch / "beat").touch()
        command = [sys.executable, *([module] if module.endswith(".py") else ["-m", module]), str(scratch / "job.json")]
        workers: list[subprocess.Popen] = []
        start = time.monotonic()
        try:
            for rank in range(processes):
                with open(scratch / f"log.{rank}", "wb") as log:
                    workers.append(
                        subprocess.Popen(
                            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT,
                            env=_environment(rank, processes, job["device"]), preexec_fn=_die_with_parent,
                        )
                    )  # fmt: skip
            while True:
                codes = [w.poll() for w in workers]
                follow(scratch)
                if any(codes):
                    raise WorkersFailed(_what_happened(scratch, workers))
                if all(code == 0 for code in codes):
                    return
                if time.time() - (scratch / "beat").stat().st_mtime > stall_s:
                    raise WorkersFailed(f"no rank has moved for {stall_s:.0f} s; {_last_words(scratch, processes)}")
                if limit_s is not None and time.monotonic() - start > limit_s:
                    raise WorkersFailed(f"not done within {limit_s:.0f} s; {_last_words(scratch, processes)}")
                time.sleep(0.1)
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.kill()
            for worker in workers:
                worker.wait()


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


def _die_with_parent() -> None:
    """In the child, before exec: be killed when the process that started it dies, however it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


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
    log = (scratch / f"log.{rank}").read_text(errors="replace").strip().splitlines()
    return f"rank {rank}: ended with {how} without a word{': ' + log[-1] if log else ''}"


def _last_words(scratch: Path, processes: int) -> str:
    lines = []
    for rank in range(processes):
        log = (scratch / f"log.{rank}").read_text(errors="replace").strip().splitlines()
        lines.append(f"rank {rank} {'last said: ' + log[-1][:300] if log else 'said nothing'}")
    return "; ".join(lines)


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
    minutes: float | None = None,
) -> list[records.Row]:
    """Sweep in a process of its own, as notebooks do: a stuck rank can't wedge the caller, who sees a bar of rows.

    Args:
        points: what to measure; what the run already holds is not measured again.
        device, out, remeasure, minutes: as `main` takes them.

    Returns:
        The newest row of each Point, failed and skipped ones included; Points that were not reached have none.

    Raises:
        WorkersFailed: the process ended without measuring anything; with its last words.
    """
    from tqdm import tqdm

    out = Path(out) if out else default_out(doctor.sweep_device(device))
    wanted = set(points)
    with tempfile.TemporaryDirectory(prefix="m3cp-") as folder:
        grid, log = Path(folder) / "points.json", Path(folder) / "log"
        grid.write_text(json.dumps([p.to_dict() for p in points]))
        command = [sys.executable, "-m", "m3cp.sweep", str(grid), "--out", str(out)]
        command += [*(["--device", device] if device else []), *(["--remeasure"] if remeasure else [])]
        command += ["--minutes", str(minutes)] if minutes else []
        before = _count_rows(out)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
        with open(log, "wb") as file, tqdm(total=len(wanted), unit="point", mininterval=0.5) as bar:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=env, preexec_fn=_die_with_parent
            )  # fmt: skip
            try:
                while process.poll() is None:
                    bar.update(min(_count_rows(out) - before, len(wanted)) - bar.n)
                    time.sleep(0.3)
            finally:
                if process.poll() is None:
                    process.kill()
                process.wait()
            newest = {r.point: r for r in (records.load(out) if _count_rows(out) else []) if r.point in wanted}
            bar.update(len(newest) - bar.n)
        said = [line for line in log.read_text(errors="replace").splitlines() if line.strip() and "point/s" not in line]
        print("\n".join(said))
        missing = len(wanted) - len(newest)
        if process.returncode not in (0, FAILED) or (missing and not minutes):
            words = said[-1] if said else "it said nothing"
            raise WorkersFailed(
                f"the sweep ended with exit status {process.returncode}, {missing} Points have no row: {words}"
            )
    return [newest[p] for p in points if p in newest]


def _count_rows(out: Path) -> int:
    path = out / records.ROWS_FILE
    return path.read_bytes().count(b"\n") if path.exists() else 0


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
    dry_run: bool = False,
    minutes: float | None = None,
    commit: str | None = None,
) -> int:
    """Measure a grid on this machine and append its rows to a run.

    Args:
        grid: as `read_grid` takes it; None is `default_grid`.
        quick: a small warm grid, under a minute.
        out: the run's folder; None is one a machine, under data/runs.
        device: "cuda", "cpu" or None for what the machine has.
        worlds: numbers of ranks; only these of a given grid. None is 1, 2, 4, 8 as far as the machine goes.
        remeasure: measure Points again that the run already holds.
        dry_run: print Points and an estimate, and measure nothing.
        minutes: stop cleanly after so long; what remains is listed.
        commit: of this code, where the copy that runs has no git history.

    Returns:
        0; 1 when a Point failed; 2 when nothing could be measured.

    Raises:
        doctor.NodeError: a machine that can't measure what was asked.
        ValueError: a bad grid or option.
    """
    began = time.monotonic()
    device = doctor.sweep_device(device)
    require("minutes", minutes, minutes is None or minutes > 0, "a positive number of minutes")
    facts = job_facts(device)
    host = doctor.cpu()
    ranks = len(facts["devices"]) if device == "cuda" else host.cores
    here = [w for w in doctor.WORLDS if doctor.skip_reason(w, device, gpus=ranks, cores=ranks) is None and w <= 8]
    worlds = list(worlds) if worlds else None
    if grid is None:
        reached = device != "cuda" or not doctor.unreachable_peers(max(here))
        if not reached:
            print("GPUs here do not all reach each other's memory: the staged form only (`m3cp doctor` names the pairs)")
        points = default_grid(device, worlds or (here if device == "cuda" else here[:2]), quick, reached)
    else:
        points = [p for p in read_grid(grid, device) if not worlds or p.world in worlds or p.arm == "page_read"]
    gpus = doctor.devices() if device == "cuda" else ()
    out = Path(out) if out is not None else default_out(device)
    held = records.load(out) if (out / records.ROWS_FILE).exists() else []
    known = set() if remeasure else records.measured(held, records.code_hash(), facts["node"])
    plan = make_plan(
        points, device=device, ranks=ranks, known=known, memory_bytes=gpus[0].memory_bytes if gpus else None
    )
    _announce(plan, device, out)
    if dry_run:
        for group in plan.groups:
            print(
                f"  {estimate_s(group, device):6.1f} s  {group.processes} ranks  {'; '.join(p.label for p in group.record)}"
            )
        return 0
    from tqdm import tqdm

    said = {r.point for r in held if r.status == "skipped"}
    for point, reason in plan.skipped.items():
        if point not in said:
            records.append(out, records.Row(point, "skipped", point.arm, facts["node"], 0, error=reason))
    command = "m3cp sweep" if grid is None else "m3cp sweep GRID"
    provenance = {**doctor.provenance(), "code_hash": records.code_hash(), **git_state(commit), "command": command}
    first_row, failures = len(held) + len(plan.skipped.keys() - said), []
    with tqdm(total=len(plan.points), unit="point", mininterval=0.5, disable=not plan.points) as bar:
        for processes in sorted({g.processes for g in plan.groups}):
            groups, restarts = [g for g in plan.groups if g.processes == processes], RESTARTS
            while groups:
                left = None if minutes is None else minutes * 60 - (time.monotonic() - began)
                if left is not None and left <= 0:
                    break
                job = {**facts, "out": str(out), "seconds": left, "provenance": provenance}
                job["groups"] = [
                    {"points": [p.to_dict() for p in g.points], "record": [p in g.record for p in g.points]}
                    for g in groups
                ]
                progress = _Progress(bar, groups)
                try:
                    launch(
                        "m3cp.worker",
                        job,
                        processes,
                        follow=progress.look,
                        limit_s=None if left is None else left + 120,
                    )
                    break
                except WorkersFailed as error:
                    current = groups[progress.current]
                    failures.append(f"{current.points[0].label}: {error}")
                    tqdm.write(f"m3cp sweep: {current.points[-1].label}: {error}", file=sys.stderr)
                    for point in current.record:
                        row = records.Row(
                            point,
                            "failed",
                            point.arm,
                            facts["node"],
                            processes,
                            error=str(error)[:800],
                            provenance=provenance,
                        )
                        records.append(out, row)
                    groups = groups[progress.current + 1 :] if restarts else []
                    restarts -= 1
    return _summary(plan, out, first_row, failures)


class _Progress:
    """Moves a bar as rank 0 says how far it is."""

    def __init__(self, bar, groups: list[Group]):
        self.current, self._bar, self._groups, self._done = 0, bar, groups, 0

    def look(self, scratch: Path) -> None:
        try:
            at = json.loads((scratch / "progress.json").read_text())
        except (OSError, ValueError):
            return
        self.current = at["current"]
        while self._done < at["done"]:
            self._bar.update(len(self._groups[self._done].record))
            self._done += 1
        self._bar.set_postfix_str(at["label"], refresh=False)


def _announce(plan: Plan, device: str, out: Path) -> None:
    seconds = sum(estimate_s(g, device) for g in plan.groups) + 20 * len({g.processes for g in plan.groups})
    largest = max(
        (sum(p.shape.blocks(n) for n in traffic.context_lengths(p)) * p.shape.key_bytes(p.dtype) for p in plan.points),
        default=0,
    )
    print(
        f"{len(plan.points)} Points to measure in {len(plan.groups)} groups, about {seconds / 60:.1f} minutes; largest cache {doctor.size(largest)}; rows go to {_near(out)}"
    )
    if plan.measured:
        print(f"{len(plan.measured)} Points are there already (`--remeasure` measures them again)")
    reasons: dict[str, int] = {}
    for reason in plan.skipped.values():
        reasons[reason] = reasons.get(reason, 0) + 1
    for reason, count in reasons.items():
        print(f"{count} Points skipped: {reason}")


def _summary(plan: Plan, out: Path, first_row: int, failures: list[str]) -> int:
    rows = records.load(out)[first_row:] if (out / records.ROWS_FILE).exists() else []
    ok = [r for r in rows if r.status == "ok"]
    failed = [r for r in rows if r.status == "failed"]
    left = [p for p in plan.points if p not in {r.point for r in rows}]
    print(
        f"{len(ok)} Points measured, {len(failed)} failed, {len(plan.skipped)} skipped, {len(left)} not reached; rows: {_near(out / records.ROWS_FILE)}"
    )
    unsteady = sum(r.unsteady for r in ok)
    if unsteady:
        print(f"{unsteady} rows are unsteady: the page-read probe moved by more than 3% around them")
    for row in failed:
        print(f"  failed: {row.point.label}: {row.error}")
    if left:
        print(f"  not measured: {'; '.join(p.label for p in left)}")
    if failed or failures:
        return FAILED
    return 0 if ok or plan.measured or plan.skipped else NOT_MEASURED


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
    parser.add_argument("--dry-run", action="store_true", help="print Points and an estimate")
    parser.add_argument("--minutes", type=float, help="stop cleanly after so long")
    parser.add_argument("--commit", help="of this code, where the copy that runs has no git history")
    return parser.parse_args(argv)


if __name__ == "__main__":
    try:
        sys.exit(main(**vars(_arguments(None))))
    except (doctor.NodeError, ValueError) as problem:
        print(f"m3cp sweep: {problem}", file=sys.stderr)
        sys.exit(NOT_MEASURED)
