"""The explorer's figure: made once with every artist it will ever need, then only given new data.

The layout is fixed, so nothing moves between redraws, and what never changes (legends, labels, most ticks) is rendered
once and kept as a background: drawing its words again would take most of the time of a picture. Marks are those of `plots`: measured filled, published
hollow, a model dashed, a computed limit dotted; TP blue with circles, CP vermillion with squares.
"""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.layout_engine import PlaceHolderLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Polygon, Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from m3cp import plots
from m3cp.explore import BATCHES, CONTEXTS, Arm, View
from m3cp.shapes import tokens_text
from m3cp.terms import TERMS

WIDTH, HEIGHT, DPI = 1150, 700, 100  # pixels
SHADES = 1.0  # log2 of the factor at which the map's colours end
TICKS = (1024, 4096, 16_384, 65_536, 262_144, 1 << 20)

# Colours and hatches of the breakdown's terms: told apart without colour, and none of them an arm's. Steps of the
# selection, whose terms are several, share the greens.
TERM_STYLE = {
    "launch": ("#4d4d4d", ""), "bytes": ("#56B4E9", ""), "beyond": ("#a6d8f5", "..."), "ramp": ("#F0E442", ""),
    "exchange": ("#8a3d00", "///"), "peers": ("#b06a3b", "..."), "payload": ("#e0b394", "xx"), "wave": ("#d9d9d9", "oo"),
    "rows": ("#CC79A7", "xxx"), "row_heads": ("#e6b8d2", "///"), "imbalance": ("#E69F00", "---"),
}  # fmt: skip
GREENS = (
    ("#009E73", "\\\\\\"), ("#66c5ab", "///"), ("#c3e6dc", "++"), ("#007a59", "..."), ("#8fd6c2", "xx"), ("#d5efe6", ""), ("#00684c", "--"),
)  # fmt: skip
TERM_STYLE |= {term: GREENS[i % len(GREENS)] for i, term in enumerate(t for t in TERMS if t not in TERM_STYLE)}


def _short(us: float) -> str:
    """A tick's microseconds."""
    return f"{us:g}" if us < 10_000 else f"{us / 1e3:g}k" if us < 1e6 else f"{us / 1e6:g}M"


def _number(us: float) -> str:
    """Microseconds with four digits, or all of them before the point."""
    return f"{us:.4g}" if us < 10_000 else f"{us:,.0f}"


def _snap(value: float, up: bool) -> float:
    """The next of 1, 2, 5 times a power of ten above (or below) a positive value."""
    power = 10.0 ** math.floor(math.log10(value))
    steps = [s * power for s in (1, 2, 5, 10)]
    return min(s for s in steps if s >= value * (1 - 1e-9)) if up else max(s for s in steps if s <= value * (1 + 1e-9))


class Dashboard:
    """Curves, map and breakdown of one `explore.View`; `show` gives the next one its data and `png` renders it."""

    @plots.styled
    def __init__(self) -> None:
        still = PlaceHolderLayoutEngine(adjust_compatible=True, colorbar_gridspec=False)  # None would be lost by savefig
        self.figure = Figure(figsize=(WIDTH / DPI, HEIGHT / DPI), dpi=DPI, layout=still)
        plots.FigureCanvasAgg(self.figure)
        self.title = self.figure.text(0.012, 0.975, "", fontsize=10, fontweight="bold", va="center")
        self._curves()
        self._map()
        self._breakdown()
        self.moving = self._moving()
        self._background: Any = None

    def _moving(self) -> list[Any]:
        """The artists that `show` changes, in the order in which they are drawn."""
        arms = [artist for of in self.lines.values() for artist in of.values()]
        curves = [*self.outside, self.crossing, self.crossing_line, self.here, *arms, self.absent]
        cells = [self.mesh, self.band, self.line, self.answers, *self.verdicts.values(), self.star, *self.names.values()]
        bars = [bar for of in self.bars.values() for bar in of.values()]
        marks = [artist for of in self.measured.values() for artist in of]
        words = [self.title, self.curves_title, self.map_title, self.parts_title, *(artist for pair in self.swatches for artist in pair)]
        drawn = [sorted(of, key=lambda artist: artist.get_zorder()) for of in (curves, cells, [*bars, *marks])]
        return [self.curves.yaxis, *drawn[0], *drawn[1], *self.map.spines.values(), self.parts.xaxis, *drawn[2], *words]

    def _context_axis(self, axis: Any) -> None:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_locator(FixedLocator(TICKS))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda v, _: tokens_text(int(round(v)))))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xlabel("context, tokens a request")

    def _curves(self) -> None:
        axis = self.curves = self.figure.add_axes((0.055, 0.425, 0.415, 0.5))
        self._context_axis(axis)
        axis.set_xlim(900, 1.15 * 2**20)
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=40))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda v, _: _short(v)))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.set_ylabel("µs a call")
        axis.yaxis.set_label_coords(-0.098, 0.5)  # found anew at every drawing otherwise
        self.outside = [axis.axvspan(1, 2, facecolor="#f1f1f1", edgecolor="none", zorder=0) for _ in range(2)]
        self.crossing = axis.axvspan(1, 2, facecolor="#000000", alpha=0.12, edgecolor="none", zorder=0.5)
        (self.crossing_line,) = axis.plot([], [], color="#000000", linestyle=(0, (5, 2)), linewidth=1.0, zorder=1)
        self.here = axis.axvline(1, color="#000000", linewidth=0.9, zorder=1)
        self.lines: dict[str, dict[str, Any]] = {}
        for arm, colour, mark in (("tp", plots.TP_COLOUR, "o"), ("cp", plots.CP_COLOUR, "s")):
            band = axis.add_patch(Polygon(np.ones((3, 2)), closed=True, facecolor=colour, alpha=0.22, edgecolor="none", zorder=2))
            (model,) = axis.plot([], [], color=colour, linestyle=(0, (5, 2)), linewidth=1.4, zorder=3)
            (limit,) = axis.plot([], [], color=colour, linestyle=":", linewidth=1.0, alpha=0.9, zorder=2)
            (reads,) = axis.plot([], [], "_", color=colour, markersize=10, markeredgewidth=1.6, zorder=3)
            (spread,) = axis.plot([], [], color=colour, linewidth=2.6, alpha=0.35, zorder=3)
            (points,) = axis.plot([], [], mark, color=colour, markersize=5.5, zorder=4)
            (ring,) = axis.plot([], [], mark, color="#000000", markerfacecolor="none", markersize=11, markeredgewidth=1.3, zorder=5)
            self.lines[arm] = {"band": band, "model": model, "limit": limit, "reads": reads, "spread": spread, "points": points, "ring": ring}
        self.absent = axis.text(0.5, 0.5, "", transform=axis.transAxes, ha="center", va="center", fontsize=10, zorder=9, bbox={"facecolor": "white", "edgecolor": "none", "pad": 3})
        self.curves_title = axis.set_title("", loc="left", fontweight="bold")
        handles = []
        for colour, mark in ((plots.TP_COLOUR, "o"), (plots.CP_COLOUR, "s")):
            handles += [
                Line2D([], [], color=colour, marker=mark, linestyle="none", markersize=5.5),
                (Patch(facecolor=colour, alpha=0.22), Line2D([], [], color=colour, linestyle=(0, (5, 2)))),
                Line2D([], [], color=colour, marker="_", linestyle="none", markersize=10, markeredgewidth=1.6),
                Line2D([], [], color=colour, linestyle=":"),
            ]  # fmt: skip
        labels = [f"{arm} {word}" for arm in ("TP", "CP") for word in ("measured", "model, 95% of its fit", "page read, measured", "limit, computed")]
        self.curve_legend = self.figure.legend(handles, labels, loc="upper left", bbox_to_anchor=(0.04, 0.358), ncols=2, fontsize=7.5, columnspacing=1.2)
        shade = [
            (Patch(facecolor="#000000", alpha=0.12), Line2D([], [], color="#000000", linestyle=(0, (5, 2)), linewidth=1.0)),
            Patch(facecolor="#f1f1f1", edgecolor="#cccccc"),
            Line2D([], [], color="#000000", marker="o", markerfacecolor="none", linestyle="-", markersize=9),
            Line2D([], [], color="#777777", marker="s", markerfacecolor="none", linestyle="none", markersize=5.5),
        ]  # fmt: skip
        words = ["break-even, model, 95%", "outside the fitted contexts", "your point", "hollow: published"]
        self.figure.legend(shade, words, loc="upper left", bbox_to_anchor=(0.335, 0.358), ncols=1, fontsize=7.5)

    def _map(self) -> None:
        axis = self.map = self.figure.add_axes((0.545, 0.425, 0.365, 0.5))
        self._context_axis(axis)
        x, y = plots.cell_edges(CONTEXTS), plots.cell_edges(BATCHES)
        self.mesh = axis.pcolormesh(x, y, np.zeros((len(BATCHES), len(CONTEXTS))), cmap=plots.DIVERGING, norm=Normalize(-SHADES, SHADES), zorder=1)
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_locator(FixedLocator(BATCHES))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda v, _: str(int(round(v)))))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.set_ylabel("batch, requests")
        axis.set_xlim(x[0], x[-1])
        axis.set_ylim(y[0], y[-1])
        axis.grid(False)
        axis.set_facecolor("#ededed")
        self.map_title = axis.set_title("", loc="left", fontweight="bold")
        self.band = axis.add_patch(Polygon(np.ones((3, 2)), closed=True, facecolor="#000000", alpha=0.18, edgecolor="none", zorder=2))
        (self.line,) = axis.plot([], [], color="#000000", linestyle=(0, (5, 2)), linewidth=1.5, zorder=3)
        (self.answers,) = axis.plot([], [], "-D", color="#000000", markerfacecolor="white", markersize=4.5, linewidth=1.2, zorder=4)
        self.verdicts = {}
        for word, mark, colour in (("SLOWER", "o", plots.TP_COLOUR), ("FASTER", "s", plots.CP_COLOUR), ("even", "o", "#ffffff")):
            (self.verdicts[word],) = axis.plot([], [], mark, color=colour, markeredgecolor="#000000", markeredgewidth=0.7, markersize=6, linestyle="none", zorder=5)
        (self.star,) = axis.plot([], [], "*", color="#F0E442", markeredgecolor="#000000", markersize=17, linestyle="none", zorder=7)
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1.5}
        self.names = {w: axis.text(1, 1, f"{w} faster", ha="center", va="center", fontsize=9, fontweight="bold", bbox=box, zorder=6) for w in ("TP", "CP")}
        bar = self.figure.colorbar(self.mesh, extend="both", cax=self.figure.add_axes((0.921, 0.425, 0.012, 0.5)))
        ticks = (-1.0, -0.5, 0.0, 0.5, 1.0)
        bar.set_ticks(ticks, labels=[f"TP {2**-t:.2f}×" if t < 0 else "even" if t == 0 else f"CP {2**t:.2f}×" for t in ticks])
        bar.outline.set_visible(False)
        self.shades_title = bar.ax.set_title("faster by", fontsize=8, loc="left")
        marks = [
            Line2D([], [], marker="o", color=plots.TP_COLOUR, markeredgecolor="#000000", linestyle="none"),
            Line2D([], [], marker="s", color=plots.CP_COLOUR, markeredgecolor="#000000", linestyle="none"),
            Line2D([], [], marker="o", color="#ffffff", markeredgecolor="#000000", linestyle="none"),
            (Patch(facecolor="#000000", alpha=0.18), Line2D([], [], color="#000000", linestyle=(0, (5, 2)))),
            Line2D([], [], color="#000000", marker="D", markerfacecolor="white", markersize=4.5),
            Line2D([], [], marker="*", color="#F0E442", markeredgecolor="#000000", markersize=12, linestyle="none"),
        ]  # fmt: skip
        labels = ["TP faster, measured or published", "CP faster, measured or published", "even or undecided, likewise", "break-even, model, 95%", "break-even between measured points", "your point"]
        self.map_legend = self.figure.legend(marks, labels, loc="upper left", bbox_to_anchor=(0.53, 0.358), ncols=2, fontsize=7.5, columnspacing=1.2)

    def _breakdown(self) -> None:
        axis = self.parts = self.figure.add_axes((0.055, 0.065, 0.45, 0.135))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda v, _: _short(v)))
        axis.set_yticks([1, 0], ["TP", "CP"], fontweight="bold")
        axis.set_ylim(-0.5, 1.5)
        axis.set_xlabel("µs a call at your point, modelled term by term")
        axis.xaxis.set_label_coords(0.5, -0.24)
        axis.grid(axis="y", visible=False)
        self.parts_title = axis.set_title("", loc="left", fontweight="bold")
        self.bars = {
            arm: {
                term: axis.add_patch(Rectangle((0, at - 0.32), 0, 0.64, facecolor=colour, hatch=hatch, edgecolor="white", linewidth=0.6, zorder=2))
                for term, (colour, hatch) in TERM_STYLE.items()
            }
            for arm, at in (("tp", 1.0), ("cp", 0.0))
        }
        self.measured = {}
        for arm, at in (("tp", 1.0), ("cp", 0.0)):
            (median,) = axis.plot([], [], "D", color="#000000", markersize=6, zorder=4)
            (read,) = axis.plot([], [], "|", color="#000000", markersize=22, markeredgewidth=1.6, zorder=4)
            total = axis.text(0, at, "", va="center", fontsize=8.5, zorder=5)
            self.measured[arm] = (median, read, total)
        self.swatches = []
        for i in range(len(TERM_STYLE) + 1):
            top, left = 0.215 - 0.0235 * (i % 9), 0.53 + 0.235 * (i // 9)
            swatch = Rectangle((left, top - 0.007), 0.016, 0.014, transform=self.figure.transFigure, linewidth=0.6, edgecolor="white")
            self.figure.add_artist(swatch)
            self.swatches.append((swatch, self.figure.text(left + 0.02, top, "", fontsize=7.5, va="center")))

    @plots.styled
    def show(self, view: View) -> None:
        """Give every artist the data of a view; nothing is created, removed or laid out anew."""
        self.title.set_text(view.title)
        for title in (self.curves_title, self.map_title):
            title.set_color("#8a3d00" if view.state.asks else "#000000")
        self._show_curves(view)
        self._show_map(view)
        self._show_parts(view)

    def _show_curves(self, view: View) -> None:
        state, x = view.state, np.array(CONTEXTS, dtype=float)
        self.curves_title.set_text(f"Batch {state.batch}" + (f", WHAT IF {state.what_if}" if state.asks else ""))
        self.here.set_xdata([state.context_tokens] * 2)
        shown: list[float] = []
        for arm, values in (("tp", view.tp), ("cp", view.cp)):
            artists, read = self.lines[arm], np.isfinite(values.us)
            artists["model"].set_data(x[read], values.us[read])
            artists["limit"].set_data(x, values.limit)
            ends = [*zip(x[read], values.low[read], strict=True), *zip(x[read][::-1], values.high[read][::-1], strict=True)]
            artists["band"].set_xy(np.array(ends) if ends else np.ones((3, 2)))
            points = values.points
            artists["points"].set_data(points[:, 0], points[:, 1])
            artists["points"].set_markerfacecolor("none" if view.published else artists["model"].get_color())
            artists["points"].set_alpha(0.35 if state.asks else 1.0)
            bars = np.column_stack([points[:, 0], points[:, 2], points[:, 0], points[:, 3], points[:, 0], np.full(len(points), np.nan)])
            artists["spread"].set_data(*bars.reshape(-1, 2).T)  # a gap behind each bar
            artists["reads"].set_data(values.reads[:, 0], values.reads[:, 1])
            at = _at(view, values)
            artists["ring"].set_data([state.context_tokens] if at else [], [at] if at else [])
            shown += [*values.us[read], *points[:, 1], *values.reads[:, 1]]
        if shown:
            self.curves.set_ylim(_snap(max(min(shown) / 1.1, max(shown) / 3000), False), _snap(max(shown) * 1.1, True))
        row = BATCHES.index(state.batch)
        line, low, high = view.plane.line[row], view.plane.low[row], view.plane.high[row]
        self.crossing_line.set_data([line, line] if np.isfinite(line) else [], list(self.curves.get_ylim()) if np.isfinite(line) else [])
        _span(self.crossing, (low, high) if np.isfinite(low) and np.isfinite(high) else None)
        inside = view.inside
        _span(self.outside[0], (900, inside[0]) if inside and inside[0] > 900 else None)
        _span(self.outside[1], (inside[1], 1.15 * 2**20) if inside else None)
        self.absent.set_text("" if not view.why else "\n".join(_wrapped(f"{'No model' if view.plane.cells else 'Not measured here'}: {view.why}", 44)))

    def _show_map(self, view: View) -> None:
        plane, state = view.plane, view.state
        self.map_title.set_text(f"Who wins, {view.basis}{', what if' if state.asks else ''}")
        self.mesh.set_array(np.ma.masked_invalid(plane.ratio))
        batches = np.array(BATCHES, dtype=float)
        known = np.isfinite(plane.line)
        self.line.set_data(plane.line[known], batches[known])
        known = np.isfinite(plane.low) & np.isfinite(plane.high)
        ends = [*zip(plane.low[known], batches[known], strict=True), *zip(plane.high[known][::-1], batches[known][::-1], strict=True)]
        self.band.set_xy(np.array(ends) if len(ends) > 3 else np.ones((3, 2)))
        alpha = 0.35 if state.asks else 1.0
        self.answers.set_data(plane.answers[:, 0], plane.answers[:, 1])
        self.answers.set_alpha(alpha)
        for word, artist in self.verdicts.items():
            cells = [c for c in plane.cells if (c[2] if c[2] in ("FASTER", "SLOWER") else "even") == word]
            artist.set_data([c[0] for c in cells], [c[1] for c in cells])
            artist.set_alpha(alpha)
        self.star.set_data([state.context_tokens], [state.batch])
        for word, artist in self.names.items():
            where = np.argwhere(plane.ratio < -0.03 if word == "TP" else plane.ratio > 0.03)
            artist.set_visible(len(where) > 6)
            if len(where) > 6:
                row, column = np.median(where, axis=0).astype(int)
                artist.set_position((CONTEXTS[column], BATCHES[row]))

    def _show_parts(self, view: View) -> None:
        arms = {"tp": view.tp, "cp": view.cp}
        longest = 0.0
        for arm, values in arms.items():
            left = 0.0
            for term, bar in self.bars[arm].items():
                width = values.parts.get(term, 0.0)
                bar.set_x(left)
                bar.set_width(width)
                left += width
            median, read, total = self.measured[arm]
            at = next((p[1] for p in values.points if p[0] == view.state.context_tokens), None)
            floor = next((r[1] for r in values.reads if r[0] == view.state.context_tokens), None)
            row = 1.0 if arm == "tp" else 0.0
            median.set_data([] if at is None else [at], [] if at is None else [row])
            median.set_markerfacecolor("none" if view.published else "#000000")
            read.set_data([] if floor is None else [floor], [] if floor is None else [row])
            words = [f"{_number(left)} modelled"] if left else []
            words += [f"{_number(at)} {'published' if view.published else 'measured'}"] if at is not None else []
            total.set_text("  " + ", ".join(words))
            total.set_x(max(left, at or 0.0))
            longest = max(longest, left, at or 0.0)
        self.parts.set_xlim(0, _snap(longest * 1.45, True) if longest else 1)
        used = [term for term in TERM_STYLE if any(term in values.parts for values in arms.values())]
        self.parts_title.set_text("Where the microseconds go" if used else "No breakdown: no model at this point")
        entries = [(TERM_STYLE[term], _meaning(term, view)) for term in used]
        for i, (swatch, text) in enumerate(self.swatches):
            swatch.set_visible(i < len(entries))
            text.set_text(entries[i][1] if i < len(entries) else "")
            if i < len(entries):
                colour, hatch = entries[i][0]
                swatch.set_facecolor(colour)
                swatch.set_hatch(hatch or None)
        marks = ["◆ " + ("published" if view.published else "measured")] if any(len(m[0].get_xdata()) for m in self.measured.values()) else []
        marks += ["| page read, measured"] if any(len(m[1].get_xdata()) for m in self.measured.values()) else []
        self.swatches[len(entries)][1].set_text("   ".join(marks))

    @plots.styled
    def png(self) -> bytes:
        """The picture, `WIDTH` by `HEIGHT` pixels."""
        from PIL import Image

        canvas = self.figure.canvas
        if self._background is None:
            for animated in (True, False):  # an animated artist is left out of a drawing
                for artist in self.moving:
                    artist.set_animated(animated)
                if animated:
                    canvas.draw()
            self._background = canvas.copy_from_bbox(self.figure.bbox)
        canvas.restore_region(self._background)
        renderer = canvas.get_renderer()
        for artist in self.moving:
            artist.draw(renderer)
        buffer = io.BytesIO()
        Image.fromarray(np.asarray(canvas.buffer_rgba())[:, :, :3]).save(buffer, format="png", compress_level=1)
        return buffer.getvalue()


def _at(view: View, arm: Arm) -> float | None:
    """Where the ring of the state's point stands: on the measured point, else on the model."""
    mine = [p[1] for p in arm.points if p[0] == view.state.context_tokens]
    if mine and not view.state.asks:
        return float(mine[0])
    us = arm.us[CONTEXTS.index(view.state.context_tokens)]
    return float(us) if np.isfinite(us) else None


def _meaning(term: str, view: View) -> str:
    """A term in words; the fixed cost says what can't be told apart from it."""
    words = [TERMS[term].meaning]
    if term == "launch":
        words += ["CP's exchange in it"] if "exchange" not in view.cp.parts else []
        words += ["the what-if too"] if view.state.exchange_us else []
    return ", ".join(words)


def _span(patch: Any, ends: tuple[float, float] | None) -> None:
    """Move an axvspan, or hide it."""
    patch.set_visible(ends is not None)
    if ends is not None:
        patch.set_x(ends[0])
        patch.set_width(ends[1] - ends[0])


def _wrapped(words: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(words, width)
