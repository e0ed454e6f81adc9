"""Figures as data, to be compared with stored ones: what their artists hold, not their pixels.

Fonts and renderers differ between machines; titles, labels, ticks and plotted numbers must not. Only what is
deterministic is compared: dashed lines are models, bands and bars are bootstraps, and both are left out.

    python tests/stored_figures.py     writes tests/stored/*.json again, from what the code draws now
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from pathlib import Path

import numpy as np
import synthetic
from matplotlib.collections import Collection
from matplotlib.container import ErrorbarContainer
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle

from m3cp import lesson, records, report, review
from m3cp.shapes import IndexerShape, Point

STORED = Path(__file__).with_name("stored")
SHAPE = IndexerShape(heads=4, head_dim=64, block_size=64, topk=4)
GPUS = {"gpus": [{"name": "synthetic", "arch": "sm_90", "units": 132}]}


def number(value) -> float | str:
    """Six significant digits; "nan" and "inf" as words, for JSON."""
    value = float(value)
    return float(f"{value:.6g}") if np.isfinite(value) else str(value)


def facts(figure) -> dict:
    """What a figure says: words and numbers of every axis, of its deterministic artists alone."""
    found = {"size": [number(v) for v in figure.get_size_inches()], "legend": [], "axes": []}
    for legend in figure.legends:
        found["legend"] += [text.get_text() for text in legend.get_texts()]
    for axis in figure.axes:
        lines = [
            {"marker": str(line.get_marker()), "colour": str(line.get_color()), "x": [number(v) for v in np.atleast_1d(line.get_xdata())], "y": [number(v) for v in np.atleast_1d(line.get_ydata())]}
            for line in axis.lines
            if line not in modelled(axis) and not line.is_dashed() and not is_hollow(line) and line.get_linestyle() not in (":", "--")
        ]  # fmt: skip
        boxes = [
            [number(v) for v in (*patch.get_xy(), patch.get_width(), patch.get_height())] + [matplotlib_hex(patch)]
            for patch in axis.patches
            if isinstance(patch, Rectangle)
        ]
        images = [
            [[number(v) for v in row] for row in np.ma.filled(image.get_array(), np.nan)]
            for image in axis.images
            if isinstance(image, AxesImage)
        ]
        assert all(isinstance(c, Collection) for c in axis.collections)
        found["axes"].append({
            "title": axis.get_title(loc="left"), "x": axis.get_xlabel(), "y": axis.get_ylabel(),
            "xticks": [t.get_text() for t in axis.get_xticklabels()], "yticks": [t.get_text() for t in axis.get_yticklabels()],
            "texts": [t.get_text() for t in axis.texts], "lines": lines, "boxes": boxes, "images": images,
        })  # fmt: skip
    return found


def modelled(axis) -> list:
    """Lines that belong to error bars: those stand for what a model says."""
    return [
        line for bars in axis.containers if isinstance(bars, ErrorbarContainer) for line in (bars[0], *bars[1]) if line
    ]


def is_hollow(line) -> bool:
    """Whether its marker has no face: modelled, or published."""
    face = line.get_markerfacecolor()
    return isinstance(face, str) and face == "none"


def matplotlib_hex(patch) -> str:
    """A patch's colour as a word."""
    from matplotlib.colors import to_hex

    return to_hex(patch.get_facecolor())


def same(now, stored, where: str = "figure") -> list[str]:
    """Differences between two `facts`, in words; numbers may differ by a thousandth."""
    if isinstance(stored, dict) and isinstance(now, dict) and set(now) == set(stored):
        return [d for key in stored for d in same(now[key], stored[key], f"{where}.{key}")]
    if isinstance(stored, list) and isinstance(now, list) and len(now) == len(stored):
        return [d for i, (a, b) in enumerate(zip(now, stored, strict=True)) for d in same(a, b, f"{where}[{i}]")]
    numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (now, stored))
    if numbers and abs(now - stored) <= 1e-3 * max(abs(now), abs(stored), 1e-9):
        return []
    return [] if now == stored else [f"{where}: {now!r}, stored is {stored!r}"]


def toy_scores() -> np.ndarray:
    """`[4 heads, 24 blocks]` by arithmetic alone; the last block is forced and has none."""
    scores = np.array([[(7 * b + 5 * h) % 23 for b in range(24)] for h in range(4)], dtype=float)
    scores[:, -1] = -np.inf
    return scores


def page_table():
    """Blocks strewn over 32 pages."""
    return lesson.page_table([(11 * b + 3) % 31 for b in range(24)], 32)


def token_scores():
    """A saw of scores over 24 blocks, the last partly empty."""
    dots = np.array([(13 * i) % 29 - 14 for i in range(24 * 64)], dtype=float)
    return lesson.token_scores(dots, [4, 15, 16, 23], SHAPE, 1516, head=2)


def selection():
    """The best three of each head, and the forced block."""
    scores = toy_scores()
    ids = np.array([sorted([*np.argsort(-row[:-1], kind="stable")[:3], 23]) for row in scores])
    return lesson.selection(scores, ids, forced=[23])


def key_bits():
    """A forced key above two equal scores."""
    from m3cp import keys

    rest = keys.MAX_BLOCKS - 1
    made = [
        (2 << 60) | (rest - 23),
        (1 << 60) | (0xC1C98000 << 28) | (rest - 15),
        (1 << 60) | (0xC1C98000 << 28) | (rest - 16),
    ]
    return lesson.key_bits(list(zip(("block 23, forced", "block 15", "block 16"), made, strict=True)))


def who_reads():
    """Four ranks."""
    return lesson.who_reads(4, SHAPE, 24)


def merging():
    """Each of four ranks sends its best four."""
    row = toy_scores()[2]
    rank = np.where(np.isfinite(row), row, 1e9)
    sent = [sorted(range(r, 24, 4), key=lambda b: (-rank[b], b))[:4] for r in range(4)]
    best = sorted(sorted(range(24), key=lambda b: (-rank[b], b))[:4])
    return lesson.merging(row, sent, best, head=2)


@functools.cache
def rows() -> tuple[records.Row, ...]:
    """Synthetic rows of two arms on one machine, with page reads at four numbers of ranks; no noise."""
    found = synthetic.rows(contexts=(1024, 4096, 8192, 16_384, 32_768, 131_072), batches=(1, 8, 32), jitter=0.0)
    rng = np.random.default_rng(0)
    for context in (8192, 131_072):
        for world in (1, 2, 4, 8):
            point = Point(context, 8, world=world, arm="page_read", max_context=2**20)
            found.append(
                synthetic.row(
                    point, synthetic.truth_us(point, {"launch": 2.5, "us_per_mb": 0.21 / world}), rng, jitter=0.0
                )
            )
    return tuple(dataclasses.replace(row, provenance={**row.provenance, **GPUS}) for row in found)


@functools.cache
def reviewed() -> review.Review:
    """A review of `rows`, read from a folder as any run is."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        for row in rows():
            records.append(Path(folder) / "synthetic-node", row)
        return review.gather(str(Path(folder) / "synthetic-node"))


FIGURES = {
    "walkthrough_pages": page_table, "walkthrough_scores": token_scores, "walkthrough_selection": selection, "walkthrough_keys": key_bits,
    "walkthrough_shards": who_reads, "walkthrough_merge": merging, "review_gains": lambda: report.gains(reviewed().main),
    "review_scaling": lambda: report.scaling(reviewed()), "review_arms": lambda: report.every_arm(reviewed()),
    "review_published": lambda: report.beside_published(reviewed()),
}  # fmt: skip


def main() -> None:
    """Write every stored figure again."""
    STORED.mkdir(exist_ok=True)
    for name, draw in FIGURES.items():
        (STORED / f"{name}.json").write_text(json.dumps(facts(draw()), separators=(",", ":"), sort_keys=True) + "\n")
        print(STORED / f"{name}.json")


if __name__ == "__main__":
    sys.exit(main())
