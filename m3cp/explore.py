"""What the explorer shows for a state of its controls: curves, map, breakdown and the answer in words. No drawing here.

A state that nothing was measured for gets a reason in words and no number. Measured, modelled, assumed and published
figures keep their names. Neither torch nor triton is imported.
"""

from __future__ import annotations

import dataclasses
import functools
import html
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from m3cp import crossover, engines, fit, frames, records
from m3cp.serving import Setting
from m3cp.shapes import DTYPES, MIXES, QUERIES, require, tokens_text

# 1k to 1M tokens, four steps an octave from 4k on, all multiples of 1,024 so that every shard is even.
CONTEXTS = (1024, 2048, 3072, *(m * 1024 << k for k in range(8) for m in (4, 5, 6, 7)), 1 << 20)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
GRID = tuple((c, b) for b in BATCHES for c in CONTEXTS)
READING = ("bytes", "beyond")  # terms that a bandwidth changes
WORLDS = (2, 4, 8)
WAYS = ("one_launch/symmetric", "staged/symmetric", "staged/collective", "vllm/collective", "sglang/collective")
WAY_WORDS = {
    "one_launch": "one launch", "two_launch": "two launches", "staged": "staged", "vllm": "vLLM's kernels",
    "sglang": "SGLang's kernels", "symmetric": "symmetric memory", "collective": "collective",
}  # fmt: skip
EXCHANGE_US = (-10.0, 20.0)
BANDWIDTH = (0.5, 2.0)
DRAWS = 200
ABSENT = "here"  # the node's name while this machine has no run


@dataclass(frozen=True)
class State:
    """Everything the controls say; what a YAML export holds.

    Args:
        node: a run's name, "published", or "here" while this machine has none.
        context_tokens: of each request, the longest for ragged mixes; one of `CONTEXTS`.
        batch: requests; one of `BATCHES`.
        mix: how lengths spread (`traffic.context_lengths`).
        world: ranks, P.
        dtype: of the index cache.
        way: kernels and exchange, "form/exchange" or "engine/exchange", such as "one_launch/symmetric".
        queries: "gathered" or "replicated".
        exchange_us: what if every CP call took so many microseconds more (less, if negative)?
        bandwidth: what if bytes were read so many times as fast?

    Raises:
        ValueError: naming the field, what was given and what is allowed.
    """

    node: str = ""
    context_tokens: int = 32_768
    batch: int = 8
    mix: str = "uniform"
    world: int = 2
    dtype: str = "bf16"
    way: str = "one_launch/symmetric"
    queries: str = "gathered"
    exchange_us: float = 0.0
    bandwidth: float = 1.0

    def __post_init__(self) -> None:
        for name in ("node", "way"):
            require(name, getattr(self, name), isinstance(getattr(self, name), str), "a text")
        for name in ("exchange_us", "bandwidth"):
            value = getattr(self, name)
            require(name, value, isinstance(value, (int, float)) and not isinstance(value, bool), "a number")
        for name, allowed in (("context_tokens", CONTEXTS), ("batch", BATCHES), ("mix", MIXES), ("world", WORLDS), ("dtype", DTYPES), ("queries", QUERIES)):
            value = getattr(self, name)
            require(name, value, value in allowed and not isinstance(value, bool), f"one of {', '.join(map(str, allowed))}")
        kernels, _, exchange = self.way.partition("/")
        require("way", self.way, kernels in WAY_WORDS and exchange in ("symmetric", "collective"), f"such as {', '.join(WAYS)}")
        for name, (low, high) in (("exchange_us", EXCHANGE_US), ("bandwidth", BANDWIDTH)):
            require(name, getattr(self, name), low <= getattr(self, name) <= high, f"{low:g} to {high:g}")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> State:
        """A state from a mapping, as `10_sweep` and `20_crossover` take it in their parameter `state`.

        Raises:
            ValueError: a name that no field has, or a value that is not allowed.
        """
        known = [f.name for f in dataclasses.fields(cls)]
        unknown = sorted(set(values) - set(known))
        require("state", ", ".join(unknown), not unknown, f"made of {', '.join(known)}")
        return cls(**values)

    @property
    def asks(self) -> bool:
        """Whether a what-if knob is away from what was measured."""
        return self.exchange_us != 0 or self.bandwidth != 1

    @property
    def what_if(self) -> str:
        """The knobs in words; "" where they are neutral."""
        words = [f"CP {self.exchange_us:+g} µs"] if self.exchange_us else []
        words += [f"bandwidth × {self.bandwidth:g}"] if self.bandwidth != 1 else []
        return ", ".join(words)

    def to_yaml(self) -> str:
        """The file that `papermill -f` gives to `10_sweep` (measure this point) and to `20_crossover` (open here)."""
        import yaml

        return yaml.safe_dump({"state": dataclasses.asdict(self)}, sort_keys=False)


def sweep_axes(state: State) -> dict[str, list[Any]]:
    """The axes of `10_sweep` that measure a state's point on the machine at hand; the what-if knobs can't be measured."""
    kernels, _, exchange = state.way.partition("/")
    engine = kernels in ("vllm", "sglang")
    arms = [f"{kernels}_tp", f"{kernels}_cp"] if engine else ["tp", "cp"]
    axes: dict[str, list[Any]] = {
        "contexts": [state.context_tokens], "batches": [state.batch], "worlds": [state.world], "mixes": [state.mix],
        "dtypes": [state.dtype], "arms": [*arms, "page_read"], "exchanges": [exchange], "queries": [state.queries],
    }  # fmt: skip
    return axes if engine else {**axes, "forms": [kernels]}


def way_of(comparison: crossover.Comparison) -> str:
    """A comparison's kernels and exchange, as `State.way` says them."""
    pair = comparison.pairs.iloc[0]
    kernels = pair["arm"].removesuffix("_cp") if frames.missing(pair["form"]) else pair["form"]
    return f"{kernels}/{pair['exchange']}"


def way_text(way: str) -> str:
    """A way in words: "one launch, symmetric memory"."""
    return ", ".join(WAY_WORDS[part] for part in way.split("/"))


@dataclass(frozen=True)
class Surface:
    """One arm's model over `BATCHES` and `CONTEXTS`, worked out once, so that a move is arithmetic on arrays.

    Args:
        model: what it is of.
        design: `[batches, contexts, terms]`.
        us: estimates, `[batches, contexts]`.
        drawn: draws of them, `[draws, batches, contexts]`.
        reading, reading_drawn: of which reading bytes, which a bandwidth changes.
    """

    model: fit.CostModel
    design: np.ndarray
    us: np.ndarray
    drawn: np.ndarray
    reading: np.ndarray
    reading_drawn: np.ndarray

    @classmethod
    def of(cls, model: fit.CostModel, changes: Mapping[str, Any], seed: int) -> Surface:
        """A model's surface for its Points changed in some fields; seeds as in `crossover.difference`."""
        shape = (len(BATCHES), len(CONTEXTS))
        design, best, draws = model.design(GRID, **changes), model.fit.usable, model.fit.draws(DRAWS, seed)
        read = [i for i, name in enumerate(model.terms) if name in READING]
        return cls(
            model, design.reshape(*shape, -1), (design @ best).reshape(shape), (draws @ design.T).reshape(DRAWS, *shape),
            (design[:, read] @ best[read]).reshape(shape), (draws[:, read] @ design[:, read].T).reshape(DRAWS, *shape),
        )  # fmt: skip

    def asked(self, state: State) -> tuple[np.ndarray, np.ndarray]:
        """(`us`, `drawn`) under a state's what-if knobs; a fixed cost does not fall below 0."""
        if not state.asks:
            return self.us, self.drawn
        slower, added = 1 / state.bandwidth - 1, 0.0
        if self.model.arm.endswith("cp"):
            added = max(state.exchange_us, -self.model.fit.value("launch"))
        return self.us + slower * self.reading + added, self.drawn + slower * self.reading_drawn + added

    def parts(self, state: State) -> dict[str, float]:
        """{term: microseconds} at a state's point, under its knobs."""
        costs = self.design[BATCHES.index(state.batch), CONTEXTS.index(state.context_tokens)] * self.model.fit.usable
        found = dict(zip(self.model.terms, map(float, costs), strict=True))
        for name in READING:
            if name in found:
                found[name] /= state.bandwidth
        if self.model.arm.endswith("cp"):
            found["launch"] = max(0.0, found["launch"] + state.exchange_us)
        return {name: us for name, us in found.items() if us > 0}


@dataclass(frozen=True)
class Scene:
    """What a node knows of one mix, P, dtype, way and query sharing.

    Args:
        measured: the comparison of exactly this, None where none was measured.
        tp, cp: cost models to predict from, None where there are none.
        changes: what their Points are changed in, such as the world.
        why: why there is no model, in words; "" where there is one.
        assumed: what the model rests on besides rows, in words; "" if nothing.
        bytes_per_us: best measured page read, for the limit; None without one.
        scope: title words: node, P, dtype, mix, way.
    """

    measured: crossover.Comparison | None
    tp: fit.CostModel | None
    cp: fit.CostModel | None
    changes: dict[str, Any]
    why: str
    assumed: str
    bytes_per_us: float | None
    scope: str

    @functools.cached_property
    def surfaces(self) -> tuple[Surface, Surface] | None:
        """TP's and CP's, None without a model."""
        return None if self.tp is None else (Surface.of(self.tp, self.changes, 0), Surface.of(self.cp, self.changes, 1))

    @functools.cached_property
    def read(self) -> np.ndarray:
        """Which of `CONTEXTS` read keys; the model is not about the others."""
        return np.array(CONTEXTS) > self.unread

    @property
    def unread(self) -> int:
        """Contexts up to this many tokens read no key."""
        shape = self.cp.template.shape if self.cp else self.measured.pairs["shape"].iloc[0]
        return shape.topk * shape.block_size

    @functools.cached_property
    def pairs(self) -> dict[tuple[int, int], dict[str, Any]]:
        """The measured pairs by (context, batch), as plain values."""
        if self.measured is None:
            return {}
        lines = self.measured.pairs.drop(columns="draws").to_dict("records")
        return {(int(line["context_tokens"]), int(line["batch"])): line for line in lines}

    @functools.cached_property
    def reads(self) -> dict[tuple[str, int], np.ndarray]:
        """Measured page reads, {(arm, batch): [(context, microseconds)]}."""
        if self.measured is None:
            return {}
        rows = self.measured.frame.dropna(subset=["page_read_us"])
        base = crossover.BASELINE[self.measured.pairs["arm"].iloc[0]]
        found: dict[tuple[str, int], dict[float, float]] = {}
        for arm, batch, context, us in zip(rows["arm"], rows["batch"], rows["context_tokens"], rows["page_read_us"], strict=True):
            found.setdefault(("tp" if arm == base else "cp", int(batch)), {})[float(context)] = float(us)
        return {key: np.array(sorted(values.items())) for key, values in found.items()}


class Node:
    """A machine, recorded, local or published, with the comparisons of its rows, read when first asked for.

    Args:
        name: the run's, for states.
        kind: "measured here", "recorded" or "published".
        machine: such as "2x NVIDIA H200".
        read: gives the rows and their comparisons.
    """

    def __init__(self, name: str, kind: str, machine: str, read: Callable[[], tuple[Any, Sequence[crossover.Comparison]]]):
        self.name, self.kind, self.machine, self._read = name, kind, machine, read
        self._scenes: dict[tuple, Scene] = {}

    @property
    def label(self) -> str:
        """For the chooser."""
        if self.name == ABSENT:
            return "this machine: nothing measured yet"
        where = "this machine" if self.kind == "measured here" else self.kind
        return f"{where}: {self.machine}" + ("" if self.kind == "published" else f" ({self.name})")

    @functools.cached_property
    def rows(self) -> tuple[Any, Sequence[crossover.Comparison]]:
        """The frame of its rows, None without any, and all comparisons."""
        return self._read()

    @functools.cached_property
    def comparisons(self) -> list[crossover.Comparison]:
        """Those that the explorer moves through: one query token, no padding rows, no shared prefix, never adaptive."""
        plain = {"query_len": 1, "rows_padded": 0, "shared_prefix_tokens": 0, "boundary": ""}
        kept = []
        for found in self.rows[1]:
            pair = found.pairs.iloc[0]
            if all(pair[k] == v for k, v in plain.items()) and frames.missing(pair["threshold_blocks"]):
                kept.append(found)
        return sorted(kept, key=lambda c: -int((c.pairs["cache_state"] == "cold").sum()))  # short rows read nothing: warm

    @functools.cached_property
    def measured(self) -> list[dict[str, Any]]:
        """What each of the comparisons is of: world, dtype, mix, queries and way."""
        lines = [(c.pairs.iloc[0], way_of(c)) for c in self.comparisons]
        return [{"world": int(p["world"]), **{n: str(p[n]) for n in ("dtype", "mix", "queries")}, "way": way} for p, way in lines]

    def values(self, name: str, **wanted: Any) -> list[Any]:
        """What was measured of `name`, a key of `measured`, where the others are as wanted."""
        return list(dict.fromkeys(of[name] for of in self.measured if all(of[k] == v for k, v in wanted.items())))

    def find(self, **wanted: Any) -> list[crossover.Comparison]:
        """The comparisons of what is wanted, by keys of `measured`."""
        pairs = zip(self.comparisons, self.measured, strict=True)
        return [c for c, of in pairs if all(of[k] == v for k, v in wanted.items())]

    def nearest(self, state: State) -> State:
        """The state on this node, with what it has no rows of moved to what it has: P and mix, or all of its headline's."""
        moved = dataclasses.replace(state, node=self.name)
        if not self.comparisons or not self.scene(moved).why:
            return moved
        alike = {"dtype": state.dtype, "way": state.way, "queries": state.queries}
        head = crossover.headline(self.find(**alike) or self.comparisons)
        return dataclasses.replace(moved, **self.measured[self.comparisons.index(head)])

    def within(self, state: State) -> State:
        """The state with its batch and context moved to the nearest that lie inside what was measured."""
        measured = self.scene(state).measured
        if measured is None:
            return state

        def inside(value: int, name: str, steps: Sequence[int]) -> int:
            low, high = measured.pairs[name].min(), measured.pairs[name].max()
            return value if low <= value <= high else min(steps, key=lambda n: abs(math.log(n / min(max(value, low), high))))

        moved = {name: inside(getattr(state, name), name, steps) for name, steps in (("context_tokens", CONTEXTS), ("batch", BATCHES))}
        return dataclasses.replace(state, **moved)

    def scene(self, state: State) -> Scene:
        """What there is for a state's mix, P, dtype, way and query sharing; made once each."""
        key = (state.mix, state.world, state.dtype, state.way, state.queries)
        if key not in self._scenes:
            self._scenes[key] = self._make(state)
        return self._scenes[key]

    def _make(self, state: State) -> Scene:
        mix = state.mix.replace("_", " ")
        scope = f"{self.kind}: {self.machine}  ·  P = {state.world}  ·  {state.dtype}  ·  {mix}  ·  {way_text(state.way)}, queries {state.queries}"

        def nothing(why: str, measured: crossover.Comparison | None = None) -> Scene:
            return Scene(measured, None, None, {}, why, "", _rate(measured), scope)

        if not self.comparisons:
            return nothing("this machine has no measured CP yet: `make sweep` measures it (CP needs two ranks)" if self.name == ABSENT
                           else f"{self.machine} has no CP row beside a TP row")  # fmt: skip
        alike: dict[str, Any] = {}
        for name, words in (
            ("dtype", f"a cache of {state.dtype}"), ("way", way_text(state.way)), ("queries", f"{state.queries} queries with {way_text(state.way)}"),
        ):  # fmt: skip
            known = self.values(name, **alike)
            if getattr(state, name) not in known:
                said = "; ".join(way_text(v) if name == "way" else v for v in known)
                return nothing(f"{words} was not measured on {self.machine} (measured: {said})")
            alike[name] = getattr(state, name)
        worlds, found = sorted(self.values("world", **alike)), self.find(**alike)

        measured = next(iter(self.find(**alike, world=state.world, mix=state.mix)), None)
        fitted = [c for c in found if c.tp and c.cp]
        if measured is not None and measured.tp and measured.cp:
            return Scene(measured, measured.tp, measured.cp, {}, "", "", _rate(measured), scope + _temperature(measured))
        mixes = {*self.values("mix", **alike), *(m for c in fitted for m in c.cp.mixes)}
        if state.mix not in mixes:
            return nothing(f"{mix} batches were not measured on {self.machine} that way (measured: {', '.join(sorted(mixes))})")
        same = [c for c in self.find(**alike, world=state.world) if c.tp and c.cp]
        base = next(iter(same or fitted), None)
        if base is None:
            return nothing(f"too few sizes were measured of {way_text(state.way)} for a model; only the measured points are shown", measured)
        tp, cp, changes, assumed = base.tp, base.cp, {"world": state.world, "mix": state.mix}, ""
        if not same:
            if state.way.startswith("sglang"):
                return nothing(f"SGLang's indexer CP runs at P = 4 only; P = {state.world} was not measured on {self.machine}")
            if max(worlds) > 2 or state.world < 4:  # the cost of a further peer is told apart from P = 2 alone
                return nothing(f"P = {state.world} was not measured on {self.machine} (measured: {', '.join(map(str, worlds))})")
            tp, cp = crossover.across_worlds(self.rows[0], base)
            rests = cp.predict(cp.point(32_768, 8, **changes)).assumed
            assumed = f"P = {state.world} of CP was not measured: from rows of P = {' and '.join(map(str, worlds))}" + (f"; {rests}" if rests else "")
        return Scene(measured, tp, cp, changes, "", assumed, _rate(base), scope + _temperature(base))

    def prepare(self, state: State) -> None:
        """Work out what every redraw of a state's scene needs; milliseconds for uniform batches, up to seconds for ragged ones."""
        scene = self.scene(state)
        _ = scene.surfaces, scene.pairs, scene.reads


def _temperature(comparison: crossover.Comparison) -> str:
    pairs = comparison.pairs
    states = sorted(set(pairs[pairs["read"]]["cache_state"]))  # a row that reads no key has no temperature to speak of
    return f"  ·  {' and '.join(states)} cache" if states else ""


def _rate(comparison: crossover.Comparison | None) -> float | None:
    """Best page read of a comparison's run, bytes a microsecond; None where none was measured."""
    if comparison is None:
        return None
    rows = comparison.frame
    rows = rows[(rows["limit_us"] > 0) & (rows["distinct_bytes_read"] > 0)]
    return float((rows["distinct_bytes_read"] / rows["limit_us"]).max()) if len(rows) else None


@dataclass(frozen=True)
class Arm:
    """One arm at the state's batch: model, limit and measured points over context, microseconds.

    Args:
        us, low, high: the model over `CONTEXTS` and its 95% band; NaN where no key is read.
        limit: bytes over the run's best page read, computed; NaN where unknown.
        points: measured (context, median, lowest, highest sample), `[n, 4]`.
        reads: measured page reads (context, microseconds), `[n, 2]`.
        parts: {term: microseconds} of the model at the state's point; empty where there is none.
        drawn: draws of the model's microseconds there.
    """

    us: np.ndarray
    low: np.ndarray
    high: np.ndarray
    limit: np.ndarray
    points: np.ndarray
    reads: np.ndarray
    parts: dict[str, float]
    drawn: np.ndarray


@dataclass(frozen=True)
class Plane:
    """The map: modelled log2(TP / CP) over `BATCHES` and `CONTEXTS`, and the break-even context of each batch.

    Args:
        ratio: `[batches, contexts]`, NaN where no key is read.
        line, low, high: `[batches]` in tokens; NaN without a crossing, the band clipped to the map.
        answers: measured break-even contexts, (context, batch), `[n, 2]`.
        cells: measured points (context, batch, verdict).
    """

    ratio: np.ndarray
    line: np.ndarray
    low: np.ndarray
    high: np.ndarray
    answers: np.ndarray
    cells: tuple[tuple[int, int, str], ...]


@dataclass(frozen=True)
class View:
    """All that is shown for a state.

    Args:
        state: of the controls.
        title: what is looked at.
        why: why there is no model, in words; "" where there is one.
        tp, cp: at the state's batch.
        plane: the map.
        basis: what the curves rest on: "modelled", "P = 8 assumed", and the mix that it was fitted to where it is another.
        inside: contexts that were measured and fitted, (lowest, highest); None without a model.
        published: whether the points are others' figures.
        words: the answer, HTML.
    """

    state: State
    title: str
    why: str
    tp: Arm
    cp: Arm
    plane: Plane
    basis: str
    inside: tuple[float, float] | None
    published: bool
    words: str


class Explorer:
    """Nodes to move through, and what they show.

    Args:
        nodes: at least one.

    Raises:
        ValueError: no node, or two of one name.
    """

    def __init__(self, nodes: Sequence[Node]):
        self.nodes = {node.name: node for node in nodes}
        require("nodes", [n.name for n in nodes], 0 < len(nodes) == len(self.nodes), "at least one, each with its own name")
        self._planes: dict[tuple, tuple[Plane, Asked]] = {}

    def start(self, state: State | None = None) -> State:
        """The state to open with: the one given, which must name a node that is here, or the headline of the first node
        that has CP beside TP (one GPU alone has not).

        Raises:
            ValueError: a node that is not here.
        """
        if state is not None and state.node:
            require("node", state.node, state.node in self.nodes, f"one of {', '.join(self.nodes)}")
            return state
        every = list(self.nodes.values())
        first = next((node for node in every if node.comparisons), every[0])
        return first.within(first.nearest(state or State()))

    def options(self, state: State) -> dict[str, list[tuple[str, Any]]]:
        """(label, value) of each chooser on a state's node; what has no rows there says so in its label."""
        node = self.nodes[state.node]

        def label(name: str, value: Any, words: str) -> str:
            return words if value in node.values(name) else f"{words} – not measured here"

        ways = dict.fromkeys((*WAYS, *node.values("way"), state.way))
        worlds = []
        for world in WORLDS:
            scene = node.scene(dataclasses.replace(state, world=world))
            word = "not measured here" if scene.why else "assumed" if scene.assumed else ""
            worlds.append((f"{world} – {word}" if word else str(world), world))
        return {
            "node": [(n.label, n.name) for n in self.nodes.values()],
            "mix": [(label("mix", m, m.replace("_", " ")), m) for m in MIXES],
            "world": worlds,
            "dtype": [(label("dtype", d, d), d) for d in DTYPES],
            "way": [(label("way", w, way_text(w)), w) for w in ways],
            "queries": [(label("queries", q, q), q) for q in QUERIES],
        }

    def view(self, state: State) -> View:
        """What a state shows; a few milliseconds once its scene is prepared."""
        node = self.nodes[state.node]
        scene = node.scene(state)
        basis = [f"P = {state.world} assumed" if scene.assumed else "modelled"]
        if scene.cp is not None and state.mix not in scene.cp.mixes:
            basis.append(f"from {' and '.join(m.replace('_', ' ') for m in scene.cp.mixes)} batches")
        plane, asked = self._plane(state, scene)
        tp, cp = (_arm(state, scene, i, asked) for i in (0, 1))
        inside = None
        if scene.tp is not None:
            ranges = [m.range["context_tokens"] for m in (scene.tp, scene.cp)]
            inside = (max(r[0] for r in ranges), min(r[1] for r in ranges))
        words = _words(state, node, scene, tp, cp)
        return View(state, scene.scope, scene.why, tp, cp, plane, ", ".join(basis), inside, node.kind == "published", words)

    def _plane(self, state: State, scene: Scene) -> tuple[Plane, Asked]:
        """The map and each arm's (us, drawn), which only the scene and the knobs decide; the last 16 are kept."""
        key = (state.node, state.mix, state.world, state.dtype, state.way, state.queries, state.exchange_us, state.bandwidth)
        if key not in self._planes:
            while len(self._planes) >= 16:
                del self._planes[next(iter(self._planes))]
            self._planes[key] = _make_plane(state, scene)
        return self._planes[key]


Asked = list[tuple[np.ndarray, np.ndarray]]  # (us, drawn) of TP and CP under a state's knobs; empty without a model


def _make_plane(state: State, scene: Scene) -> tuple[Plane, Asked]:
    batches, contexts = len(BATCHES), np.array(CONTEXTS, dtype=float)
    ratio = np.full((batches, len(contexts)), np.nan)
    line, low, high = (np.full(batches, np.nan) for _ in range(3))
    asked: Asked = [surface.asked(state) for surface in scene.surfaces or ()]
    if asked:
        (tp, tp_drawn), (cp, cp_drawn) = asked
        read = scene.read
        ratio = np.where(read, np.log2(tp / cp), np.nan)
        x = contexts[read]
        value = crossover.crossings(x, (cp - tp)[:, read])
        drawn = crossover.crossings(x, (cp_drawn - tp_drawn)[:, :, read].reshape(-1, len(x))).reshape(DRAWS, batches)
        ends = np.percentile(drawn, [2.5, 97.5], axis=0, method="nearest")
        line = np.where((value > 0) & np.isfinite(value), value, np.nan)
        within = ~(np.isinf(ends[0]) | (ends[1] == 0))  # a band that lies beyond the map on one side is no band
        low, high = (np.where(within, np.clip(end, x[0], x[-1]), np.nan) for end in ends)
    answers: list[tuple[float, float]] = []
    cells: list[tuple[int, int, str]] = []
    if scene.measured is not None:
        answers = [(b.value, b.at) for b in scene.measured.measured if b.value is not None]
        cells = [(*at, pair["verdict"]) for at, pair in scene.pairs.items()]
    return Plane(ratio, line, low, high, np.array(answers).reshape(-1, 2), tuple(cells)), asked


def _arm(state: State, scene: Scene, which: int, asked: Asked) -> Arm:
    """TP (0) or CP (1) at a state's batch."""
    arm, us, low, high, limit = ("tp", "cp")[which], *(np.full(len(CONTEXTS), np.nan) for _ in range(4))
    parts: dict[str, float] = {}
    row, column, at_point = BATCHES.index(state.batch), CONTEXTS.index(state.context_tokens), np.empty(0)
    if asked:
        best, drawn = asked[which]
        surface, read = scene.surfaces[which], scene.read
        ends = np.percentile(drawn[:, row], [2.5, 97.5], axis=0)
        us, low, high = (np.where(read, v, np.nan) for v in (best[row], *ends))
        if scene.bytes_per_us:
            moved = surface.design[row, :, surface.model.terms.index("bytes")] * 1e6
            limit = np.where(read, moved / (scene.bytes_per_us * state.bandwidth), np.nan)
        if read[column]:
            parts, at_point = surface.parts(state), drawn[:, row, column]
    mine = sorted((context, pair) for (context, batch), pair in scene.pairs.items() if batch == state.batch)
    points = [(context, pair[f"{arm}_us"], pair[f"{arm}_low"], pair[f"{arm}_high"]) for context, pair in mine]
    reads = scene.reads.get((arm, state.batch), np.empty((0, 2)))
    return Arm(us, low, high, limit, np.array(points, dtype=float).reshape(-1, 4), reads, parts, at_point)


ADVICE = {
    "FASTER": "Turn CP on: CP is faster",
    "SLOWER": "Leave CP off: TP is faster",
    "SAME": "Leave CP off: no difference that matters",
    "UNDECIDED": "Undecided",
}


def _answer(kind: str, verdict: str, tp: float, cp: float, ratio: Sequence[float], delta: Sequence[float]) -> tuple[str, str]:
    """(the verdict with the gain, what it is a token) in words; `ratio` and `delta` are (value, low, high)."""
    gain = f"{ADVICE[verdict]}, TP / CP = {ratio[0]:.2f} (95% {ratio[1]:.2f} to {ratio[2]:.2f}); TP {tp:.4g} µs, CP {cp:.4g} µs a layer, {kind}"
    setting = Setting()
    ms, low, high = (setting.change_ms(v) for v in delta)
    token = (
        f"Time per output token: {ms:+.3f} ms (95% {low:+.3f} to {high:+.3f}) over {setting.scoring_layers} sparse layers, from the {kind} difference"
    )
    return gain, token


def _words(state: State, node: Node, scene: Scene, a: Arm, z: Arm) -> str:
    """The answer as HTML: the verdict, the gain, the effect a token, what it rests on, and every engine's switch."""
    where = f"{tokens_text(state.context_tokens)} tokens, batch {state.batch}, P = {state.world}"
    pair = scene.pairs.get((state.context_tokens, state.batch))
    lines: list[str] = []
    modelled = None
    if len(z.drawn):
        t, c = sum(a.parts.values()), sum(z.parts.values())
        ratio = (t / c, *(float(v) for v in np.percentile(a.drawn / z.drawn, [2.5, 97.5])))
        delta = (c - t, *(float(v) for v in np.percentile(z.drawn - a.drawn, [2.5, 97.5])))
        kind = "what-if" if state.asks else "assumed" if scene.assumed else "modelled"
        modelled = _answer(kind, crossover.verdict(*ratio[1:]), t, c, ratio, delta)
    if pair is not None and not state.asks:
        kind = "published" if node.kind == "published" else "measured"
        ratio, delta = ([pair[f"{name}{end}"] for end in ends] for name, ends in (("ratio", ("", "_low", "_high")), ("delta", ("_us", "_low", "_high"))))
        head, token = _answer(kind, pair["verdict"], pair["tp_us"], pair["cp_us"], ratio, delta)
        lines.append(token)
        if modelled:
            lines.append(f"Beside it the model: {modelled[0][0].lower()}{modelled[0][1:]}")
        if not pair["read"]:
            lines.append(f"At {tokens_text(scene.unread)} tokens or less no key is read: CP has nothing to save, and no model is drawn")
        if pair["unsteady"]:
            lines.append("The floor drifted by over 3% around these rows (marked unsteady in the run)")
        if kind == "published":
            lines.append("Published without samples: 5% noise is assumed for the intervals")
    elif modelled:
        head, token = modelled
        lines.append(token)
        if pair is not None:
            lines.append(f"Measured without the what-if: TP {pair['tp_us']:.4g} µs, CP {pair['cp_us']:.4g} µs")
    elif scene.why:
        head = f"No figure: {scene.why}" if scene.measured else f"Not measured here: {scene.why}. No figure is given"
    elif scene.tp is not None:
        head = f"No figure: at {tokens_text(scene.unread)} tokens or less no key is read, and this point was not measured"
    else:
        head = "Not measured here"
    if state.dtype.startswith("fp8"):
        narrow = frames.overlap_words(scene.measured.pairs) if scene.measured else ""
        lines.append(narrow or "how many of bf16's blocks fp8 chooses is not known here")
    if scene.assumed and modelled:
        lines.append(f"Assumed, not measured: {scene.assumed}")
    if modelled:
        tp, cp = scene.tp, scene.cp
        outside = dict.fromkeys(o for m in (tp, cp) if (o := m.outside(m.point(state.context_tokens, state.batch, **scene.changes))))
        if outside:
            lines.append(f"The model is extrapolated: {'; '.join(outside)}")
        lines.append(f"Worst miss of the fits on their own rows: TP {tp.fit.worst:.0%}, CP {cp.fit.worst:.0%}")
    if state.queries == "replicated" and scene.cp is not None:
        word = "charged" if "extra_projection" in (scene.cp.label.get("region") or ()) else "not charged"
        lines.append(f"Replicated queries: the projection of the other ranks' heads is {word}")
    said = "".join(f"<li>{html.escape(line)}.</li>" for line in lines)
    return f"<p class='m3cp-verdict'><b>{html.escape(where)}: {html.escape(head)}.</b></p><ul>{said}</ul>{_switches(state, node)}"


def _switches(state: State, node: Node) -> str:
    """Every engine's switch as HTML, with the line that proves it and whether this node can have it."""
    vendor, lines = engines.vendor_of(node.machine), []
    for switch in engines.SWITCHES:
        why = switch.refuses(vendor, state.world, state.dtype)
        here = f"not for this point: {why}" if why else f"for this point; {switch.sure}"
        on, proof, refusal = (html.escape(words) for words in (switch.on, switch.proof, switch.refusal))
        lines.append(
            f"<li><b>{html.escape(switch.engine)}</b> ({html.escape(here)}): <code>{on}</code><br>took effect: <code>{proof}</code>; did not: {refusal}</li>"
        )
    return f"<p>Each engine's switch, and the line of its log that proves it:</p><ul class='m3cp-switches'>{''.join(lines)}</ul>"


def known_nodes(given: Mapping[str, tuple[frames.Loaded, Sequence[crossover.Comparison]]], published: Sequence[crossover.Comparison], root: Path | None = None) -> list[Node]:
    """The nodes to choose from: runs already read, this machine's latest, every recorded node, and the published table.

    Args:
        given: {run: (rows, comparisons)} that a caller has at hand; the first is the one to open with.
        published: comparisons of `frames.published`.
        root: of the repository.
    """
    root = root or frames.ROOT
    nodes = []
    for name, (loaded, found) in given.items():
        nodes.append(Node(name, loaded.source, ", ".join(sorted(set(loaded.frame["node"]))), functools.partial(tuple, (loaded.frame, found))))
    runs = sorted((root / "data" / "runs").glob(f"*/{records.ROWS_FILE}"), key=lambda p: -p.stat().st_mtime_ns)[:1]
    for path in (*runs, *sorted((root / "data" / "measured").glob(f"*/{records.ROWS_FILE}"))):
        if path.parent.name not in given:
            kind = "recorded" if path.parent.parent.name == "measured" else "measured here"
            nodes.append(Node(path.parent.name, kind, _machine(path), functools.partial(_read, path.parent)))
    if not any(node.kind == "measured here" for node in nodes):
        nodes.append(Node(ABSENT, "measured here", "this machine", lambda: (None, [])))
    machine = ", ".join(sorted(set(published[0].frame["node"])))
    return [*nodes, Node("published", "published", machine, lambda: (None, published))]


def _machine(path: Path) -> str:
    """The node's name in a rows file, from its first row that has one."""
    with path.open() as lines:
        return next((node for line in lines if line.strip() and (node := json.loads(line).get("node"))), path.parent.name)


def _read(folder: Path) -> tuple[Any, list[crossover.Comparison]]:
    frame = frames.load_run(str(folder)).frame
    return frame, crossover.comparisons(frame, fit.ALL_TERMS)
