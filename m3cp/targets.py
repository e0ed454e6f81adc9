"""What the fast path is aimed at on two H200, and how a run's rows compare with it.

The aims and the page reads that they were set beside come from a prototype's study on two H200 (P = 2, bf16, graphs,
slowest rank, median). Hosts differ, so an aim is scaled by the page read of the run that is judged over the study's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from m3cp import break_even_lines, crossover, frames, layer_shares, projection
from m3cp.shapes import require, tokens_text

WORLD, NODE = 2, "2x NVIDIA H200"
MET = 0.02  # an aim counts as met within this share
PATHS = ("TP", "CP replicated", "CP gathered")
# {(context tokens, batch): microseconds of PATHS}
AIMED_US = {
    (8192, 1): (5.1, 5.1, 5.9), (8192, 8): (9.0, 7.3, 8.0), (8192, 32): (20.0, 13.2, 14.2),
    (32768, 1): (7.0, 6.3, 7.1), (32768, 8): (20.5, 13.3, 14.2), (32768, 32): (65.0, 36.5, 37.5),
    (131072, 1): (13.5, 10.8, 11.7), (131072, 8): (65.5, 37.5, 38.3), (131072, 32): (243.0, 126.0, 127.5),
}  # fmt: skip
# {(context tokens, batch): the study's page read of TP's and of CP's bytes}; 8k x 1 was warm there, so nothing scales it.
STUDY_PAGE_READ_US = {
    (8192, 8): (7.2, 5.1), (8192, 32): (18.4, 11.1), (32768, 1): (5.1, 4.2), (32768, 8): (18.4, 11.1),
    (32768, 32): (62.6, 33.5), (131072, 1): (11.0, 7.3), (131072, 8): (62.6, 33.5), (131072, 32): (239.0, 122.6),
}  # fmt: skip


@dataclass(frozen=True)
class Aim:
    """One aim at one shape.

    Args:
        path: of `PATHS`.
        measured_us, page_read_us: of the run that is judged.
        given_us: the aim as set; scaled_us: after scaling by page read.
    """

    context_tokens: int
    batch: int
    path: str
    measured_us: float
    page_read_us: float
    given_us: float
    scaled_us: float

    @property
    def met(self) -> bool:
        """Within `MET` of the scaled aim."""
        return self.measured_us <= self.scaled_us * (1 + MET)

    @property
    def above(self) -> str:
        """Over the page read of the same run, such as "+2.8, 1.95x"."""
        return f"+{self.measured_us - self.page_read_us:.1f}, {self.measured_us / self.page_read_us:.2f}x"

    @property
    def text(self) -> str:
        """Such as "6.8: missed by 0.4 (6%)"."""
        over = self.measured_us - self.scaled_us
        return f"{_us(self.scaled_us)}: " + ("met" if self.met else f"missed by {over:.1f} ({over / self.scaled_us:.0%})")


def _rows(frame: Any) -> Any:
    """The rows of the aims' own protocol, all of one grid bound and each shape of one sitting: those of which most of them are."""
    rows = frames.timed(frame)
    same = {"mix": "uniform", "dtype": "bf16", "query_len": 1, "cache": "cold", "launch": "graph", "node": NODE, "rows_padded": 0, "shared_prefix_tokens": 0, "boundary": ""}
    for name, value in same.items():
        rows = rows[rows[name] == value]
    shapes = [(c, b) in AIMED_US for c, b in zip(rows["context_tokens"], rows["batch"], strict=True)]
    rows = rows[shapes]
    require("frame", f"{len(rows)} rows", len(rows) > 0, f"rows of {NODE}, bf16, cold caches, graphs, at one of the aims' shapes")
    shown = rows[(rows["form"] == "one_launch") | rows["arm"].str.startswith("vllm")]
    require("frame", f"{len(shown)} rows", len(shown) > 0, "rows of form one_launch or of vLLM's kernels at the aims' shapes")
    kinds = shown.drop_duplicates(["max_context", "context_tokens", "batch", *crossover.VARIANT])
    bound = kinds["max_context"].value_counts().idxmax()
    rows, shown = (part[part["max_context"] == bound] for part in (rows, shown))
    most: dict[tuple[int, int], int] = {}  # of each shape, the sitting that has most of what is shown
    for shape, part in frames.split(shown, ("context_tokens", "batch")).items():
        most[shape] = part.drop_duplicates(["sitting", *crossover.VARIANT])["sitting"].value_counts().idxmax()
    return rows[[most.get((c, b)) == s for c, b, s in zip(rows["context_tokens"], rows["batch"], rows["sitting"], strict=True)]]


def _pick(rows: Any, context: int, batch: int, world: int = WORLD, **fields: Any) -> Any | None:
    """The rows of one Point (one a process); None where it was not measured."""
    found = rows[(rows["context_tokens"] == context) & (rows["batch"] == batch) & (rows["world"] == world)]
    for name, value in fields.items():
        found = found[found[name] == value]
    return found if len(found) else None


def _of(rows: Any, context: int, batch: int) -> dict[str, Any]:
    """What was measured of our paths at one shape: {path: rows or None}."""
    ours = dict(form="one_launch")
    return {
        "TP": _pick(rows, context, batch, arm="tp", **ours),
        "CP replicated": _pick(rows, context, batch, arm="cp", queries="replicated", **ours),
        "CP gathered": _pick(rows, context, batch, arm="cp", queries="gathered", **ours),
    }


def aims(frame: Any) -> list[Aim]:
    """Every aim whose path was measured.

    Args:
        frame: of `frames.table`.

    Raises:
        ValueError: no row of the aims' node and protocol.
    """
    rows, found = _rows(frame), []
    for (context, batch), given in AIMED_US.items():
        for i, (path, mine) in enumerate(_of(rows, context, batch).items()):
            if mine is None:
                continue
            read_us = float(mine["page_read_us"].median())
            study = STUDY_PAGE_READ_US.get((context, batch))
            scale = read_us / study[min(i, 1)] if study else 1.0
            found.append(Aim(context, batch, path, float(mine["median_us"].median()), read_us, given[i], given[i] * scale))
    return found


def _us(value: float) -> str:
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def _cell(rows: Any | None) -> str:
    return "-" if rows is None else _us(float(rows["median_us"].median()))


def _engine(rows: Any | None) -> str:
    """An engine's time at its own launch setting, and at the best of its sweep."""
    if rows is None:
        return "-"
    # The best setting was timed once more; where that came out slower, the engine's own was the best.
    swept = [(extra.get("best"), own) for extra, own in zip(rows["extra"], rows["median_us"], strict=True) if extra.get("settings_us")]
    best = [min(found["median_us"], own) if found else own for found, own in swept]
    return f"{_cell(rows)} / {_us(sorted(best)[len(best) // 2]) if best else '-'}"


def table(frame: Any, projections: Sequence[projection.Projection] = ()) -> list[str]:
    """Two Markdown tables: what was measured at the aims' shapes beside the engine's kernels; and against the aims.

    Args:
        frame: of `frames.table`.
        projections: of `layer_shares.extra_projections`.

    Raises:
        ValueError: as `aims`.
    """
    rows, by = _rows(frame), {(a.context_tokens, a.batch, a.path): a for a in aims(frame)}
    measured, judged = [], []
    for context, batch in AIMED_US:
        where = f"{tokens_text(context)}, {batch}"
        read = {path: _us(aim.page_read_us) for path in PATHS if (aim := by.get((context, batch, path)))}
        engine = [
            _pick(rows, context, batch, arm="vllm_tp"), _pick(rows, context, batch, arm="vllm_cp", exchange="collective"),
            _pick(rows, context, batch, arm="vllm_cp", exchange="symmetric"),
        ]  # fmt: skip
        reads = f"{read.get('TP', '-')} / {read.get('CP replicated', read.get('CP gathered', '-'))}"
        measured.append([where, reads, *map(_cell, _of(rows, context, batch).values()), *map(_engine, engine)])
        cells = [by.get((context, batch, path)) for path in PATHS]
        judged.append([where, *(text for aim in cells for text in ((aim.above, aim.text) if aim else ("-", "not measured")))])
    ours, unused = projection.find(projections, {**rows.iloc[0], "world": WORLD})
    charge = projection.published_us(WORLD)[1] + unused if ours is None else ours.note(rows["code_hash"].iloc[0])
    note = (
        f"Microseconds a call, measured on {NODE}, each line in one sitting: P = {WORLD}, bf16, one launch, cold caches, graphs, grids bound at "
        f"{tokens_text(int(rows['max_context'].iloc[0]))}; vLLM's kernels at their own launch setting / at the best of a sweep. "
        f"{charge} That is for break-even: the columns of CP replicated are without it."
    )
    head = ["context, batch", "page read TP / CP", *PATHS, "vLLM TP", "vLLM CP, NCCL", "vLLM CP, our gather"]
    against = ["context, batch", *(text for path in PATHS for text in (f"{path}: above page read", "aim, scaled"))]
    return [*crossover.markdown(head, measured), "", note, "", *crossover.markdown(against, judged), "", summary(list(by.values()))]


def summary(found: Sequence[Aim]) -> str:
    """How many aims were met, and by how much the others were missed."""
    missed = [a for a in found if not a.met]
    over = [a.measured_us - a.scaled_us for a in missed]
    words = f"{len(found) - len(missed)} of {len(found)} aims are met within {MET:.0%} after scaling by page read (8k, 1 is not scaled)"
    return words + (f"; the others are missed by {min(over):.1f} to {max(over):.1f} µs." if missed else ".")


def main(run: str = "") -> list[str]:
    """What `m3cp fit --targets` prints: the tables, then the measured break-even lines.

    Raises:
        ValueError, FileNotFoundError: in words.
    """
    loaded = frames.load_run(run)
    projections = layer_shares.extra_projections(run)
    head, rows, note = break_even_lines.line_table(break_even_lines.measured_lines(loaded.frame, projections=projections))
    return [*table(loaded.frame, projections), "", *crossover.markdown(head, rows), "", note]
