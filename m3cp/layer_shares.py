"""What share of a sparse layer the indexer is, what CP costs in eager mixed steps, and a toy model's time per token.

The rows are those of `shapes.LAYER_ARMS` (`m3cp.layer_arms` says what each times) beside the indexer's own rows of the
same run; nothing is fitted. `frames.table` leaves these arms out, so no fit, policy or figure of paths meets them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from m3cp import crossover, frames, records
from m3cp.projection import Projection
from m3cp.shapes import LAYER_ARMS, TOY_LAYERS, Point, require, tokens_text


@dataclass(frozen=True)
class Share:
    """One way to choose blocks in one layer of one shape; microseconds a call.

    Args:
        point: of the indexer's row.
        attention_of_limit: attention's time over that of its bytes at the run's page-read rate.
        projections_us: with replicated queries those that hold the other ranks' index heads too, where they were measured.
            None where none were; then they are no part of the layer.
    """

    point: Point
    indexer_us: float
    attention_us: float
    attention_of_limit: float
    projections_us: float | None

    @property
    def share(self) -> float:
        """The indexer over indexer, attention and, where measured, projections."""
        return self.indexer_us / (self.indexer_us + self.attention_us + (self.projections_us or 0.0))


@dataclass(frozen=True)
class Change:
    """What CP changes of one thing that was measured whole, beside what the indexer's rows alone change; microseconds.

    Args:
        point: of the CP row.
        tp_us, cp_us: of a whole step, or of a toy's step.
        low_us, high_us: 95% interval of CP - TP, a bootstrap of both medians over the rounds; infinite for a single one.
        indexer_us: CP - TP of the indexer's rows at the same shape.
    """

    point: Point
    tp_us: float
    cp_us: float
    low_us: float
    high_us: float
    indexer_us: float


def _cell(row: records.Row) -> tuple[Point, str]:
    """What rows of one shape share: their Point but for the arm, its own fields and the launch; and the cache state they got."""
    return row.point.replace(arm="page_read", form=None, exchange=None, queries=None, threshold_blocks=None, launch="eager"), row.cache_state


def _way(point: Point) -> tuple:
    return point.form, point.exchange, point.queries


def read(run: str = "") -> tuple[str, list[records.Row]]:
    """A run's name and its timed rows, the newest of each Point.

    Raises:
        ValueError: no row of these arms, or rows of several machines or code versions.
        FileNotFoundError: no such run.
    """
    folder = frames.find_run(run)
    rows = list({r.point: r for r in records.scan(folder) if r.status == "ok"}.values())
    require("run", run, any(r.point.arm in LAYER_ARMS for r in rows), f"a run with rows of {', '.join(LAYER_ARMS)}: `m3cp sweep data/grids/layers.json` measures them")
    kinds = {(r.node, r.provenance.get("code_hash", "unknown")) for r in rows}
    require("run", run, len(kinds) == 1, f"of one machine and one code version, found {sorted(kinds)}")
    return folder.name, rows


def shares(rows: Sequence[records.Row]) -> list[Share]:
    """The indexer's share for every TP and CP row that has an attention row at its shape, launched alike and as cold."""
    attention = {(_cell(r), r.point.launch): r for r in rows if r.point.arm == "attention"}
    products: dict[tuple, list[float]] = {}
    for r in rows:
        if r.point.arm == "projections":  # neither the context nor the cache's type matters to them
            products.setdefault((_products(r.point), r.point.queries), []).append(r.median_us)
    found = []
    for r in rows:
        beside = attention.get((_cell(r), r.point.launch))
        if r.point.arm in ("tp", "cp") and r.point.threshold_blocks is None and beside:
            same = _products(r.point)
            us = products.get((same, "replicated" if r.point.queries == "replicated" else None), products.get((same, None)))
            found.append(Share(r.point, r.median_us, beside.median_us, beside.median_us / beside.limit_us, statistics.median(us) if us else None))
    return sorted(found, key=lambda s: (s.point.world, s.point.dtype, s.point.context_tokens, s.point.batch, s.point.arm != "tp", s.point.label))


def _products(point: Point) -> tuple:
    return point.batch + point.rows_padded, point.world, point.shape, point.cache, point.launch


def _with_and_without(rows: Sequence[records.Row]) -> Iterator[tuple[records.Row, records.Row]]:
    """(one rank's own projections, those with the other ranks' index heads too), as cold and of one process, machine and code."""

    def key(r: records.Row) -> tuple:
        return r.point.replace(queries=None), r.node, r.provenance.get("code_hash", "unknown"), r.process, r.cache_state

    timed = [r for r in rows if r.status == "ok" and r.point.arm == "projections" and r.cache_state == r.point.cache]
    own = {key(r): r for r in timed if r.point.queries is None}
    for found, more in {key(r): r for r in timed if r.point.queries == "replicated"}.items():
        if found in own:
            yield own[found], more


def extra_projections(run: str = "") -> list[Projection]:
    """What projecting the other ranks' heads costs by the rows of a run and of its folder `layers`; one a machine, code and kind.

    Raises:
        FileNotFoundError: no such run.
    """
    folder = frames.find_run(run)
    found = []
    for where in (folder, folder / "layers"):
        sets: dict[tuple, dict[int, list]] = {}  # rows of two folders are two runs: never a pair
        for own, more in _with_and_without(records.load(where) if records.rows_files(where) else []):
            p = own.point
            kind = p.world, p.shape, p.cache, p.launch
            rounds = sets.setdefault((own.node, own.provenance.get("code_hash", "unknown"), kind), {})
            rounds.setdefault(p.batch + p.rows_padded, []).append((own.samples_us, more.samples_us))
        found += [Projection(*key, rounds) for key, rounds in sets.items()]
    return found


def changes(rows: Sequence[records.Row], kind: str) -> list[Change]:
    """CP - TP of the whole thing beside that of the indexer's rows, for every pair that has both.

    Args:
        kind: "mixed" (the indexer's rows replay graphs where they can) or "toy".
    """
    whole = {(_cell(r), r.point.form, r.point.launch): r for r in rows if r.point.arm == f"{kind}_tp"}
    index = {(_cell(r), r.point.arm, *_way(r.point)): r for r in _graphs_last(rows) if r.point.arm in ("tp", "cp") and r.point.threshold_blocks is None}
    found = []
    for r in rows:
        point = r.point
        tp = whole.get((_cell(r), point.form, point.launch)) if point.arm == f"{kind}_cp" else None
        ours = index.get((_cell(r), "cp", *_way(point))), index.get((_cell(r), "tp", point.form, None, None))
        if tp is not None and all(ours):
            found.append(Change(point, tp.median_us, r.median_us, *_interval(tp, r), ours[0].median_us - ours[1].median_us))
    return sorted(found, key=lambda c: (c.point.world, c.point.context_tokens, c.point.batch, c.point.label))


def _graphs_last(rows: Sequence[records.Row]) -> Iterator[records.Row]:
    yield from sorted(rows, key=lambda r: r.point.launch == "graph")


def _interval(tp: records.Row, cp: records.Row) -> tuple[float, float]:
    """95% interval of the difference of two medians."""
    if min(len(tp.samples_us), len(cp.samples_us)) < 2:
        return -math.inf, math.inf
    low, high = np.percentile(crossover.difference_draws(cp.samples_us, tp.samples_us, 2000, np.random.default_rng(0)), [2.5, 97.5])
    return float(low), float(high)


def _where(point: Point) -> str:
    extra = "".join(f", {w}" for w in (point.dtype * (point.dtype != "bf16"), point.mix * (point.mix != "uniform")) if w)
    return f"{tokens_text(point.context_tokens)}, {point.batch}{extra}"


def _name(point: Point) -> str:
    way = ", ".join(str(v).replace("_", " ") for v in _way(point) if v)
    return f"{'CP' if point.arm.endswith('cp') else 'TP'} {way}"


def _around(c: Change, minus_us: float = 0.0, unit_us: float = 1.0, digits: int = 1) -> str:
    """CP - TP less `minus_us`, in units of `unit_us`, with its interval."""
    at, *band = (f"{(v - minus_us) / unit_us:+.{digits}f}" for v in (c.cp_us - c.tp_us, c.low_us, c.high_us))
    return at + (f" ({band[0]} to {band[1]})" if math.isfinite(c.low_us) else "")


def main(run: str = "", figures: Path | None = None) -> list[str]:
    """What `m3cp fit --layers` prints: the shares, mixed steps, and the toy's measured change beside the predicted one.

    Args:
        figures: folder for the figure of the shares; None draws none.

    Raises:
        ValueError, FileNotFoundError: as `read`.
    """
    from m3cp.serving import Setting

    name, rows = read(run)
    lines = [f"{name}: {rows[0].node}; microseconds a call, slowest rank, median of the rounds"]
    parts = shares(rows)
    table = [
        [_where(s.point), str(s.point.world), _name(s.point), f"{s.indexer_us:.1f}", f"{s.attention_us:.1f}", f"{s.attention_of_limit:.2f}x",
         "-" if s.projections_us is None else f"{s.projections_us:.1f}", f"{s.share:.0%}"]
        for s in parts
    ]  # fmt: skip
    if parts and figures is not None:
        from m3cp import plots

        worlds = ", ".join(sorted({str(s.point.world) for s in parts}))
        commits = ", ".join(sorted({r.provenance.get("commit", "unknown") for r in rows}))
        drawn = plots.layer_shares([(_where(s.point), _name(s.point), s) for s in parts], f"What a sparse layer's parts take  ·  {rows[0].node}  ·  P = {worlds}")
        lines += [f"{path}" for path in plots.save(drawn, "layer_shares", name, commits, figures)]
    if table:
        head = ["context, batch", "P", "indexer", "indexer µs", "attention µs", "of its limit", "projections µs", "indexer's share"]
        held = any(r.point.arm == "projections" and r.point.queries for r in rows)
        foreign = "with replicated queries, where measured, the projections hold the other ranks' index heads" if held else "so are the other ranks' heads that replicated queries project"
        note = f"A sparse layer here is the indexer, attention over the chosen blocks and the projections (- : not measured, and left out); experts, norms and sums over ranks are left out; {foreign}. The limit is of bytes alone: below some ten microseconds attention is two launches and a chain of loads."
        lines += ["", *crossover.markdown(head, table), "", note]
    table = [
        [str(own.point.batch), str(own.point.world), f"{own.median_us:.2f}", f"{more.median_us:.2f}", _around(Change(own.point, own.median_us, more.median_us, *_interval(own, more), 0.0), digits=2),
         f"{more.limit_us - own.limit_us:+.2f}"]
        for own, more in sorted(_with_and_without(rows), key=lambda pair: (pair[0].point.world, pair[0].point.batch))
    ]  # fmt: skip
    if table:
        head = ["batch", "P", "projections µs", "with the other ranks' index heads", "extra", "its bytes alone"]
        note = "What replicated queries ask of the fused product before attention, in alternating rounds where one sweep made both (95% in brackets); its bytes alone at the page-read rate. At a P of more ranks than the machine has GPUs one of them stands for one rank."
        lines += ["", *crossover.markdown(head, table), "", note]
    table = [
        [_where(c.point), str(c.point.world), _name(c.point), f"{c.tp_us:.1f}", f"{c.cp_us:.1f}", _around(c), f"{c.indexer_us:+.1f}", _around(c, c.indexer_us)]
        for c in changes(rows, "mixed")
    ]  # fmt: skip
    if table:
        head = ["context, batch", "P", "decode rows by", "step with TP µs", "with CP µs", "CP - TP", "CP - TP of decode alone", "eager extra"]
        chunks = sorted({r.extra["chunk_tokens"] for r in rows if r.point.arm.startswith("mixed_")})
        note = f"Whole steps: all decode rows and a prefill chunk of {', '.join(map(str, chunks))} tokens behind them, eager, with nothing queued ahead of the rank that comes last (95% in brackets). TP's ranks do not wait for each other in such a step and CP's do, so \"eager extra\", what `serving.Setting.eager_extra_us` takes, holds the ranks' skew too, which a layer's sums over ranks cost TP as well."
        lines += ["", *crossover.markdown(head, table), "", note]
    setting = Setting(layers=TOY_LAYERS)
    table = [
        [_where(c.point), str(c.point.world), _name(c.point), f"{c.tp_us / 1e3:.3f}", f"{c.cp_us / 1e3:.3f}", _around(c, 0.0, 1e3, 4), f"{setting.change_ms(c.indexer_us):+.4f}"]
        for c in changes(rows, "toy")
    ]  # fmt: skip
    if table:
        head = ["context, batch", "P", "toy M3 with", "TP ms a token", "CP ms a token", "CP - TP, measured", "predicted"]
        note = f"The toy M3: {TOY_LAYERS} layers with indexer, attention, projections and a dense MLP; the prediction is `serving.Setting(layers={TOY_LAYERS})` over the indexer's rows of this run (95% of what was measured in brackets). With replicated queries the toy projects the other ranks' heads, each by launches of its own, which the prediction leaves out; a fused projection would pay for their bytes alone."
        lines += ["", *crossover.markdown(head, table), "", note]
    if len(lines) == 1:
        lines.append("Nothing to compare: no TP or CP row stands at the shape of an attention, mixed or toy row.")
    return lines
