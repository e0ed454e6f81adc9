"""What will be measured: a grid becomes Points, Points become groups over the same inputs, what can't run says why.

Nothing here starts a process or writes a file.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from m3cp import doctor, traffic
from m3cp.shapes import ARM_FIELDS, LAYER_ARMS, TOY_LAYERS, IndexerShape, Point, require
from m3cp.shard import Shard

START_S = 20.0  # about what starting workers takes
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
    if cell["world"] == 1 and not arm.endswith("tp") and arm not in ("attention", "projections"):
        return []  # one rank has nobody to share with
    choices = [
        axes[axis] if name in ARM_FIELDS[arm] else [None]
        for name, axis in (("form", "forms"), ("exchange", "exchanges"), ("queries", "queries"))
    ]
    if arm == "projections":  # what gathered queries need of them is what TP needs
        choices[2] = ["replicated" if q == "replicated" and cell["world"] > 1 else None for q in axes["queries"]]
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


def _read(source: str | Path) -> Any:
    """What a YAML or JSON file holds."""
    text = Path(source).read_text()
    if Path(source).suffix == ".json":
        return json.loads(text)
    try:
        import yaml
    except ImportError:
        raise ValueError(
            f"grid={str(source)!r}: PyYAML is not installed here; give the grid as a .json file"
        ) from None
    return yaml.safe_load(text)


def read_axes(source: Mapping[str, Any] | str | Path) -> list[Mapping[str, Any]]:
    """The mappings of axes in a grid, one or a list of them; a file as `read_grid` takes it.

    Raises:
        ValueError: Points, or anything else that is no mapping of axes.
    """
    held = _read(source) if isinstance(source, (str, Path)) else source
    axes = [held] if isinstance(held, Mapping) else held
    if not isinstance(axes, list) or not all(isinstance(a, Mapping) and "context_tokens" not in a for a in axes):
        raise ValueError(f"grid={str(source)!r}: must be a mapping of a notebook's axes, or a list of such mappings")
    return axes


def read_grid(source: Mapping[str, Any] | Sequence[Any] | str | Path, device: str) -> list[Point]:
    """Points of a grid: a mapping of axes, a list of such mappings, of Points or of their dicts, or a file of either.

    Files are YAML or JSON; `data/grids/` holds the grids of recorded runs.

    Raises:
        ValueError: a file that is neither, or what `expand` refuses.
    """
    if isinstance(source, (str, Path)):
        source = _read(source)
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
        plan.groups.append(Group(processes, tuple(dict.fromkeys((*beneath, *arms))), (*record, *arms)))
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
    if point.arm not in ("tp", "cp", "cp_local", "page_read", *LAYER_ARMS):
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
    if point.arm == "cp" or point.arm.endswith("_cp") or (point.arm == "toy_tp" and point.world > 1):
        if point.world == 1:
            return "world=1: one rank has nobody to share with"
        reason = doctor.skip_reason(point.world, device, gpus=ranks, cores=ranks)
        if reason:
            return reason
    need = cache_bytes(point)
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


def plan_s(groups: Sequence[Group], device: str) -> float:
    """About how long groups take with the starts of their workers, seconds."""
    return sum(estimate_s(g, device) for g in groups) + START_S * len({g.processes for g in groups})


def cache_bytes(point: Point) -> int:
    """Bytes of one index-K cache of a Point, all requests together; of the toy model K and V too, in all its layers."""
    blocks = sum(point.shape.blocks(n) for n in traffic.context_lengths(point))
    toy = TOY_LAYERS * (1 + 2 * Shard(0, point.world, point.shape.heads).local_heads) if point.arm.startswith("toy_") else 1
    return toy * blocks * point.shape.key_bytes(point.dtype)
