"""Frames to figures: pure functions that return a matplotlib Figure, and the one function that saves them.

Measured, modelled, computed and published never share a mark: measured is a filled marker, a model is a dashed line,
a computed limit a dotted line, and published figures stand in panels that say so. Colours are blue for TP and
vermillion for CP throughout; maps also carry words and hatches, so that they survive a black-and-white printer.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from m3cp import crossover, fit, frames
from m3cp.break_even_lines import MeasuredLine
from m3cp.shapes import tokens_text

STYLE = Path(__file__).with_name("style.mplstyle")
TP_COLOUR, CP_COLOUR, FLOOR_COLOUR, LINE_COLOUR = "#0072B2", "#D55E00", "#5a5a5a", "#000000"
DIVERGING = LinearSegmentedColormap.from_list("tp_cp", [TP_COLOUR, "#9cc9e6", "#f7f7f7", "#f3b48c", CP_COLOUR])
ARM_COLOURS = {
    "tp": (TP_COLOUR, "#004c78", "#7fb8d9"), "cp": (CP_COLOUR, "#CC79A7", "#E69F00", "#8a3d00", "#7a2f5a"), "cp_local": ("#009E73", "#00583f"),
    "vllm_tp": ("#56B4E9",), "vllm_cp": ("#E69F00", "#a86f00"), "sglang_tp": (TP_COLOUR,), "sglang_cp": (CP_COLOUR, "#8a3d00"),
}  # fmt: skip
ARM_MARKER = {"tp": "o", "cp": "s", "cp_local": "D", "vllm_tp": "^", "vllm_cp": "v", "sglang_tp": "o", "sglang_cp": "s"}


INCHES_A_LETTER = 0.066  # of a map's 7.5 point words


def styled(function):
    """Run a drawing function under the one style file, whatever the caller's settings are."""
    import functools

    @functools.wraps(function)
    def inside(*args: Any, **kwargs: Any):
        with matplotlib.rc_context():
            matplotlib.rcParams.update(matplotlib.rc_params_from_file(STYLE, use_default_template=False))
            return function(*args, **kwargs)

    return inside


def figure(width: float, height: float) -> Figure:
    """An empty Figure with its own canvas, unknown to pyplot, so that nothing leaks when it is dropped."""
    fig = Figure(figsize=(width, height))
    FigureCanvasAgg(fig)
    return fig


@styled
def save(fig: Figure, name: str, run: str, commit: str, folder: Path | str = "figures") -> list[Path]:
    """Save a figure as SVG and PNG, stamped with where its data come from. The only function that writes figures.

    Args:
        fig: any Figure of this module.
        name: file name without an ending.
        run: the run or runs shown, in words, for the footer.
        commit: of the code that drew it; "unknown" is allowed.
        folder: created when missing.

    Returns:
        The paths written, SVG first. The same figure gives the same bytes.

    Raises:
        ValueError: a name with a path or an ending in it, or an empty run.
    """
    if not name or Path(name).name != name or Path(name).suffix in (".svg", ".png"):
        raise ValueError(f"name={name!r}: must be a file name without folder and ending")
    if not run:
        raise ValueError("run='': a figure names the run that it shows")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stamp = getattr(fig, "m3cp_stamp", None)
    if stamp is None:
        fig.m3cp_stamp = stamp = fig.text(0.995, 0.004, "", ha="right", va="bottom", fontsize=6, color="#777777")
        engine = fig.get_layout_engine()
        if isinstance(engine, ConstrainedLayoutEngine):
            low = 0.2 / fig.get_figheight()  # inches for the stamp
            engine.set(rect=(0, low, 1, 1 - low))
    short = ", ".join(word[:12] for word in commit.split(", "))  # a hash is told by its first digits
    stamp.set_text(f"{run}  ·  commit {short}")
    paths = [folder / f"{name}.svg", folder / f"{name}.png"]
    fig.savefig(paths[0], metadata={"Date": None, "Creator": "m3cp"})
    fig.savefig(paths[1], metadata={"Software": "m3cp"})
    return paths


INCHES_A_TICK = 0.28  # of "256k"


def context_axis(axis, contexts: Sequence[float]) -> None:
    """Label an x axis in tokens, base 2, one tick a context given; of those that would touch, powers of two stay."""
    logs = [math.log2(c) for c in {float(c) for c in contexts}]
    inches = axis.get_position().width * axis.figure.get_size_inches()[0]
    apart, kept = (max(logs) - min(logs)) * INCHES_A_TICK / inches, []
    for log in sorted(logs, key=lambda log: (log % 1 != 0, log)):
        if all(abs(log - other) >= apart for other in kept):
            kept.append(log)
    ticks = sorted(2.0**log for log in kept)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [tokens_text(int(t)) if t == int(t) else crossover.tokens_about(t) for t in ticks])
    axis.set_xticks([], minor=True)
    axis.set_xlabel("context, tokens a request")


def _us_ticks(axis) -> None:
    """Plain numbers on a logarithmic axis of microseconds, at 1, 2 and 5 times powers of ten."""
    low, high = axis.get_ylim()
    axis.set_yscale("log")
    steps = (1, 2, 5) if high / max(low, 1e-9) < 300 else (1,)
    ticks = [s * 10.0**e for e in range(-2, 8) for s in steps if low <= s * 10.0**e <= high]
    axis.set_yticks(ticks, [f"{t:g}" if t < 10_000 else f"{t / 1000:g}k" for t in ticks])
    axis.set_yticks([], minor=True)
    axis.set_ylim(low, high)


def arm_name(values: Any) -> str:
    """An arm as legends name it: "CP one_launch/symmetric/gathered", "vLLM TP"."""
    arm = values["arm"]
    name = {"tp": "TP", "cp": "CP", "cp_local": "CP without exchange", "page_read": "page read"}.get(arm)
    name = name or arm.replace("vllm", "vLLM").replace("sglang", "SGLang").replace("_tp", " TP").replace("_cp", " CP")
    parts = [str(values[k]) for k in ("form", "exchange") if not frames.missing(values.get(k))]
    if not frames.missing(values.get("queries")):
        parts.append(str(values["queries"]))
    if not frames.missing(values.get("threshold_blocks")):
        parts.append(f"adaptive above {values['threshold_blocks']:.0f} blocks")
    return " ".join([name, "/".join(parts)]).strip()


def _title(frame, extra: str = "") -> str:
    first = frame.iloc[0]
    words = [first["node"], f"P = {first['world']}", first["dtype"]]
    words += [f"{first['query_len']} query tokens"] if first["query_len"] > 1 else []
    words += [] if first["mix"] == "uniform" else [str(first["mix"]).replace("_", " ")]
    states = sorted(set(frame["cache_state"]))
    words.append(f"{states[0]} cache" if len(states) == 1 else "cold and warm caches, marked")
    if set(frame["launch"]) == {"eager"}:
        words.append("eager launches")
    return "\n".join(filter(None, ["  ·  ".join([*words, *([extra] if extra else [])]), frames.overlap_words(frame)]))


@styled
def curves(frame, models: Sequence[fit.CostModel] = (), title: str = "") -> Figure:
    """Measured microseconds over context, one panel a batch: medians, spread, fits, limit and page read.

    Args:
        frame: of `frames.table`, one world, dtype, query length, mix and node; arms as they come.
        models: whose lines are drawn, dashed; matched to the arms by their labels.
        title: words in front of the panels' common title.

    Raises:
        ValueError: rows of different experiments.
    """
    rows = frames.timed(frame)
    floors = rows[rows["arm"] == "page_read"]
    rows = rows[rows["arm"] != "page_read"]
    if rows.empty:
        raise ValueError("curves: no timed rows of an indexer arm")
    frames.require_same(
        rows, ("world", "dtype", "query_len", "shape", "mix", "node", "code_hash", "boundary", "launch"), "curves"
    )
    batches = sorted(set(rows["batch"]))
    across = len(batches) if len(batches) <= 4 else 3
    down = math.ceil(len(batches) / across)
    entries = 3 * len(variant_names(rows)) + 4
    columns = 2 if across < 4 else 3
    fig = figure(max(7.4, 2.9 * across), 2.7 * down + 0.55 + 0.17 * math.ceil(entries / columns))
    axes = fig.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    contexts = sorted(set(rows["context_tokens"]))
    variants = frames.groups(rows, crossover.VARIANT)
    handles: dict[str, Any] = {}
    shown: list[float] = []
    word = "published" if set(rows["source"]) == {"published"} else "measured"
    for number, axis in enumerate(axes.flat):
        if number >= len(batches):
            axis.set_visible(False)
            continue
        batch = batches[number]
        axis.set_title(f"batch {batch}", loc="left", fontweight="bold")
        for key, part in variants.items():
            arm = key[0]
            name = arm_name(dict(zip(crossover.VARIANT, key, strict=True)))
            shades = ARM_COLOURS.get(arm, ("#000000",))
            colour = shades[[k for k in variants if k[0] == arm].index(key) % len(shades)]
            mine = part[part["batch"] == batch].sort_values("context_tokens")
            for _, line in mine.iterrows():
                low, high = min(line["samples_us"]), max(line["samples_us"])
                axis.vlines(line["context_tokens"], low, high, color=colour, linewidth=2.6, alpha=0.35)
                face = (
                    "none"
                    if word == "published"
                    else "white"
                    if line["cache_state"] == "warm" and "cold" in set(rows["cache_state"])
                    else colour
                )
                axis.plot(
                    line["context_tokens"],
                    line["median_us"],
                    ARM_MARKER.get(arm, "o"),
                    color=colour,
                    markerfacecolor=face,
                    zorder=3,
                )
                shown += [low, high]
            face = "none" if word == "published" else colour
            handles.setdefault(
                f"{name}: {word}",
                Line2D([], [], color=colour, markerfacecolor=face, marker=ARM_MARKER.get(arm, "o"), linestyle="none"),
            )
            for model in models:
                if all(model.label.get(k) == v for k, v in zip(crossover.VARIANT, key, strict=True)):
                    axis.plot(*_model_line(model, contexts, batch), color=colour, linestyle=(0, (5, 2)), linewidth=1.0)
                    handles.setdefault(
                        f"{name}: fit", Line2D([], [], color=colour, linestyle=(0, (5, 2)), linewidth=1.0)
                    )
            limit = mine.dropna(subset=["limit_us"])
            limit = limit[limit["limit_us"] > 0].drop_duplicates("context_tokens")
            first = key == next(k for k in variants if k[0] == arm)
            if len(limit) and arm in ("tp", "cp") and first:
                axis.plot(
                    limit["context_tokens"],
                    limit["limit_us"],
                    color=colour,
                    linestyle=":",
                    linewidth=1.0,
                    marker=".",
                    markersize=2.5,
                    alpha=0.8,
                )
                handles.setdefault(
                    f"{arm.upper()} limit: bytes over bandwidth, computed",
                    Line2D([], [], color=colour, linestyle=":", linewidth=1.0),
                )
                shown += list(limit["limit_us"])
            reads = mine.dropna(subset=["page_read_us"]).drop_duplicates("context_tokens")
            if len(reads) and arm in ("tp", "cp") and first:
                axis.plot(
                    reads["context_tokens"], reads["page_read_us"], "_", color=colour, markersize=9, markeredgewidth=1.6
                )
                handles.setdefault(
                    f"{arm.upper()} page read: measured floor",
                    Line2D([], [], color=colour, marker="_", markersize=9, markeredgewidth=1.6, linestyle="none"),
                )
                shown += list(reads["page_read_us"])
        alone = floors[floors["batch"] == batch]
        if len(alone) and not handles_have(handles, "page read: measured floor"):
            axis.plot(
                alone["context_tokens"], alone["median_us"], "_", color=FLOOR_COLOUR, markersize=9, markeredgewidth=1.6
            )
            handles.setdefault(
                "page read, measured",
                Line2D([], [], color=FLOOR_COLOUR, marker="_", markersize=9, markeredgewidth=1.6, linestyle="none"),
            )
        context_axis(axis, contexts)
        axis.tick_params(labelbottom=True)
        axis.set_xlabel("context, tokens a request" if number + across >= len(batches) else "")
    floor_of_view = max(min(shown) / 1.25, max(min(rows["median_us"]) / 40, 1e-3))
    axes[0, 0].set_ylim(floor_of_view, max(shown) * 1.3)
    _us_ticks(axes[0, 0])
    for line in axes:
        line[0].set_ylabel("µs a call")
    if set(rows["cache_state"]) == {"cold", "warm"}:
        handles["hollow: warm cache"] = Line2D(
            [], [], color="#000000", marker="o", markerfacecolor="white", linestyle="none"
        )
    if any(len(samples) > 1 for samples in rows["samples_us"]):
        handles["bar: all rounds"] = Line2D([], [], color="#000000", linewidth=2.6, alpha=0.35)
    fig.suptitle(f"{title + ': ' if title else ''}{_title(rows)}", fontsize=10, x=0.01, ha="left")
    fig.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns)
    return fig


def variant_names(rows) -> set[str]:
    """The variants of a frame as legends name them."""
    return {arm_name(dict(zip(crossover.VARIANT, key, strict=True))) for key in frames.groups(rows, crossover.VARIANT)}


def handles_have(handles: dict[str, Any], words: str) -> bool:
    """Whether a legend already has an entry with these words."""
    return any(words in name for name in handles)


def _model_line(model: fit.CostModel, contexts: Sequence[int], batch: int) -> tuple[list[int], list[float]]:
    shape = model.template.shape
    step = shape.block_size * max(1, model.template.world)
    first = shape.topk * shape.block_size + step  # shorter rows read no key, and the fit is not about them
    low, high = max(min(contexts), first), max(contexts)
    grid = [c for c in crossover.context_grid(low, high, step, 61) if c >= first] if high > low else []
    return grid, [model.us(model.point(c, batch)) for c in grid]


@dataclass(frozen=True)
class Panel:
    """One map of a figure of maps.

    Args:
        title: what it shows, such as "recorded: 2x NVIDIA H200".
        pairs: of `crossover.pairs`, one variant, world, mix.
        measured: break-even answers by interpolation, axis "context_tokens".
        model: break-even answers of a fit, axis "context_tokens".
        kind: "measured" or "published".
    """

    title: str
    pairs: Any
    measured: Sequence[crossover.BreakEven] = ()
    model: Sequence[crossover.BreakEven] = ()
    kind: str = "measured"
    notes: Sequence[str] = field(default_factory=tuple)


def cell_edges(values: Sequence[float]) -> np.ndarray:
    """Cell borders of sorted values: halfway in the logarithm, the outer ones as far out as the inner ones."""
    logs = np.log2(np.asarray(values, dtype=float))
    if len(logs) == 1:
        return 2.0 ** np.array([logs[0] - 0.5, logs[0] + 0.5])
    middle = (logs[:-1] + logs[1:]) / 2
    return 2.0 ** np.concatenate([[2 * logs[0] - middle[0]], middle, [2 * logs[-1] - middle[-1]]])


MOST_CELL = 2.0  # a cell reaches at most so many times its context, and as far below: beyond, nothing was measured


def cell_words(pair: Any) -> str:
    """A cell's words: who wins and by what factor; "≈" where the interval of the ratio TP / CP contains 1."""
    ratio = pair["ratio"]
    if pair["verdict"] in ("UNDECIDED", "SAME"):
        return f"≈ {ratio:.2f}"
    return f"CP {ratio:.2f}×" if ratio > 1 else f"TP {1 / ratio:.2f}×"


def _fitting(words: str, inches: float) -> str:
    """A cell's words in the form that its width holds: one line, two, the number alone, or none."""
    for form in (words, words.replace(" ", "\n"), words.split(" ")[-1].strip("×*")):
        if max(map(len, form.split("\n"))) * INCHES_A_LETTER <= inches:
            return form
    return ""


def draw_map(axis, panel: Panel, limit: float, width: float) -> None:
    """Draw one map of TP against CP into an axis: cells by ratio with words and hatches, the break-even line on top.

    `width`: inches that the axis will be wide, which decides how much a cell says.
    """
    frames.require_same(
        panel.pairs,
        ("world", "dtype", "query_len", "shape", "mix", "node", "code_hash", "launch", *crossover.VARIANT),
        panel.title,
    )
    contexts, batches = sorted(set(panel.pairs["context_tokens"])), sorted(set(panel.pairs["batch"]))
    y = cell_edges(batches)
    # Each batch has borders of its own: contexts that were measured for another one alone would make its cells slivers.
    spans = {}
    for batch in batches:
        row = sorted(set(panel.pairs["context_tokens"][panel.pairs["batch"] == batch]))
        edges = cell_edges(row)
        spans |= {(c, batch): (max(low, c / MOST_CELL), min(high, c * MOST_CELL)) for c, low, high in zip(row, edges, edges[1:], strict=False)}
    x = np.array([min(low for low, _ in spans.values()), max(high for _, high in spans.values())])
    for _, pair in panel.pairs.iterrows():
        j = batches.index(pair["batch"])
        left, right = spans[pair["context_tokens"], pair["batch"]]
        shade = 0.5 + 0.5 * max(-1.0, min(1.0, math.log2(pair["ratio"]) / limit))
        colour = DIVERGING(shade)
        open_ = pair["verdict"] in ("UNDECIDED", "SAME")
        hatch = "..." if open_ else ("////" if pair["ratio"] < 1 else None)
        cell = Rectangle(
            (left, y[j]), right - left, y[j + 1] - y[j], facecolor=colour, edgecolor="white", linewidth=1.2, zorder=1
        )
        axis.add_patch(cell)
        if hatch:
            axis.add_patch(
                Rectangle(
                    (left, y[j]),
                    right - left,
                    y[j + 1] - y[j],
                    fill=False,
                    hatch=hatch,
                    edgecolor="#00000030" if not open_ else "#00000055",
                    linewidth=0,
                    zorder=1.5,
                )
            )
        red, green, blue, _ = colour
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
        share = math.log2(right / left) / math.log2(x[-1] / x[0])
        text = axis.annotate(
            _fitting(cell_words(pair) + ("*" if pair["unsteady"] else ""), share * width), (math.sqrt(left * right), y[j] ** 0.24 * y[j + 1] ** 0.76),
            ha="center", va="center", fontsize=7.5, color="white" if dark else "black", zorder=6, linespacing=0.95,
        )  # fmt: skip
        text.set_bbox({"facecolor": colour, "edgecolor": "none", "pad": 0.6, "alpha": 0.85})
    context_axis(axis, contexts)
    axis.set_yscale("log", base=2)
    axis.set_yticks(batches, [str(b) for b in batches])
    axis.set_yticks([], minor=True)
    axis.set_ylabel("batch, requests")
    axis.set_xlim(x[0], x[-1])
    axis.set_ylim(y[0], y[-1])
    axis.grid(False)
    _line(axis, panel.model, x, LINE_COLOUR, (0, (5, 2)), None)
    _line(axis, panel.measured, x, LINE_COLOUR, "-", "D")
    axis.set_title(panel.title, loc="left", fontweight="bold")


def _line(
    axis, answers: Sequence[crossover.BreakEven], x: np.ndarray, colour: str, style: Any, marker: str | None
) -> None:
    """A break-even line and its band over the batches that have an answer; the band is clipped to the map."""
    known = [a for a in answers if a.value is not None and x[0] <= a.value <= x[-1]]
    if not known:
        return
    values, at = [a.value for a in known], [a.at for a in known]
    if marker:
        axis.plot(values, at, color="white", linewidth=3.2, zorder=4.9)
        axis.plot(
            values,
            at,
            color=colour,
            linestyle=style,
            marker=marker,
            markersize=4,
            markerfacecolor="white",
            linewidth=1.4,
            zorder=5,
        )
        for answer in known:
            axis.plot(
                [max(answer.low, x[0]), min(answer.high, x[-1])], [answer.at] * 2, color=colour, linewidth=1.0, zorder=5
            )
        return
    axis.fill_betweenx(
        at,
        [max(a.low, x[0]) for a in known],
        [min(a.high, x[-1]) for a in known],
        color="#000000",
        alpha=0.16,
        linewidth=0,
        zorder=2,
    )
    axis.plot(values, at, color=colour, linestyle=style, linewidth=1.3, zorder=4.5)


@styled
def maps(panels: Sequence[Panel], title: str = "") -> Figure:
    """Maps of TP against CP over context and batch, side by side on one colour scale.

    Raises:
        ValueError: no panel, or a panel that mixes experiments.
    """
    if not panels or any(panel.pairs.empty for panel in panels):
        raise ValueError("maps: each panel needs at least one pair of a CP row and its TP baseline")
    widths = [max(4.8 if len(panels) == 1 else 3.4, 0.7 * len(set(p.pairs["context_tokens"])) + 1.0) for p in panels]
    tall = max(len(set(p.pairs["batch"])) for p in panels)
    fig = figure(sum(widths) + 1.1, max(3.6, 0.5 * tall + 2.2))
    axes = fig.subplots(1, len(panels), squeeze=False, width_ratios=widths)[0]
    limit = max(0.25, *(float(np.abs(np.log2(p.pairs["ratio"].to_numpy(dtype=float))).max()) for p in panels))
    for axis, panel in zip(axes, panels, strict=True):
        draw_map(axis, panel, limit, widths[list(axes).index(axis)] * 0.93)
        cold = sorted(set(panel.pairs["cache_state"]))
        words = [
            panel.kind,
            f"P = {panel.pairs['world'].iloc[0]}",
            panel.pairs["dtype"].iloc[0],
            f"{' and '.join(cold)} cache",
            *panel.notes,
        ]
        narrow = frames.overlap_words(panel.pairs)
        lines = ["  ·  ".join(words[:4]), "  ·  ".join(words[4:]), *filter(None, [narrow])]
        note = axis.annotate(
            "\n".join(lines).rstrip(),
            (0, 0),
            (0, -32),
            xycoords="axes fraction",
            textcoords="offset points",
            fontsize=7,
            color="#555555",
            va="top",
        )
        note.set_in_layout(False)  # a long note must not squeeze the map
        axis.set_xlabel(axis.get_xlabel() + "\n" * len(lines))  # room for it
    shades = matplotlib.cm.ScalarMappable(matplotlib.colors.Normalize(-limit, limit), DIVERGING)
    bar = fig.colorbar(shades, ax=list(axes), pad=0.015, fraction=0.03, aspect=28)
    steps = [s for s in (0.125, 0.25, 0.5, 1, 2, 4) if s <= limit] or [limit]
    steps = [steps[-1] / 2, steps[-1]]
    ticks = [-s for s in reversed(steps)] + [0.0] + steps
    bar.set_ticks(
        ticks, labels=[f"TP {2**-t:.2f}×" if t < 0 else ("even" if t == 0 else f"CP {2**t:.2f}×") for t in ticks]
    )
    bar.set_label("faster by")
    bar.outline.set_visible(False)
    legend = [
        Patch(facecolor=TP_COLOUR, hatch="////", edgecolor="#00000060", label="TP faster by"),
        Patch(facecolor=CP_COLOUR, label="CP faster by"),
        Patch(facecolor="#f7f7f7", hatch="...", edgecolor="#888888", label="≈ TP / CP, interval holds 1"),
    ]
    if any(a.value is not None for p in panels for a in p.measured):
        legend.append(
            Line2D(
                [],
                [],
                color=LINE_COLOUR,
                marker="D",
                markerfacecolor="white",
                markersize=4,
                label="break-even between points, 95%",
            )
        )
    if any(a.value is not None for p in panels for a in p.model):
        legend.append(
            (Patch(facecolor="#000000", alpha=0.16), Line2D([], [], color=LINE_COLOUR, linestyle=(0, (5, 2))))
        )
    labels = [h.get_label() if not isinstance(h, tuple) else "break-even of the fit, 95%" for h in legend]
    if any(panel.pairs["unsteady"].any() for panel in panels):
        legend.append(Line2D([], [], linestyle="none"))
        labels.append("* the floor drifted by over 3%")
    fig.legend(legend, labels, loc="outside lower center", ncols=2 if len(panels) == 1 else 3)
    if title:
        fig.suptitle(title, fontsize=10, x=0.01, ha="left")
    return fig


@styled
def break_even(lines: Sequence[MeasuredLine], title: str = "From where CP is not slower") -> Figure:
    """Measured break-even over context, a line a CP variant, a height a batch; what lies outside the range points out.

    A bar is the 95% interval; a hollow triangle pointing left stands at the shortest context measured, where CP was
    faster already, one pointing right at the longest, where TP still was.

    Args:
        lines: of `break_even_lines.measured_lines`.
        title: words in front of the figure's title.

    Raises:
        ValueError: no line.
    """
    if not lines:
        raise ValueError("break_even: no line, no CP row met a TP row")
    first = lines[0].first
    batches = sorted({a.at for line in lines for a in line.answers})
    contexts = sorted({c for line in lines for c in line.pairs["context_tokens"]})
    fig = figure(7.4, max(3.6, 0.36 * len(batches) + 2.4))
    axis = fig.subplots()
    styles = {("cp", "gathered"): (CP_COLOUR, "s"), ("cp", "replicated"): ("#CC79A7", "D"), ("vllm_cp", "gathered"): ("#E69F00", "v"), ("sglang_cp", "gathered"): ("#009E73", "^")}
    for number, line in enumerate(lines):
        kind = line.variant["arm"], line.variant["queries"]
        before = sum(kind == (earlier.variant["arm"], earlier.variant["queries"]) for earlier in lines[:number])  # lines of that colour
        colour, marker = styles.get(kind, (LINE_COLOUR, "o"))
        style = ("-", (0, (4, 2)), (0, (1, 2)), (0, (6, 2, 1, 2)))[before % 4]
        lift = 2.0 ** (0.055 * (number - (len(lines) - 1) / 2))  # lines at one batch must not hide each other
        known = [a for a in line.answers if a.value is not None and a.answer == "crosses"]
        # A batch without a crossing breaks the line: its neighbours say nothing about it.
        axis.plot([a.value if a in known else math.nan for a in line.answers], [a.at * lift for a in line.answers], color=colour, linestyle=style, marker=marker,
                  markersize=4.5, markerfacecolor="white" if before else colour, label=textwrap.fill(line.name, 48), zorder=4)  # fmt: skip
        for a in line.answers:
            low, high = line.measured(a.at)
            if a in known:
                axis.hlines(a.at * lift, max(a.low, low), min(a.high, high), color=colour, linewidth=2.4, alpha=0.4)
            elif a.answer == "undecided":
                axis.plot(low / 1.13, a.at * lift, marker="$?$", color=colour, markersize=6, zorder=5)
            else:
                below = a.answer == "below range"
                axis.plot(low / 1.06 if below else high * 1.06, a.at * lift, "<" if below else ">", color=colour, markerfacecolor="white", markersize=6, zorder=3)
    context_axis(axis, [c for c in contexts if c & (c - 1) == 0] or contexts)
    axis.set_yscale("log", base=2)
    axis.set_yticks(batches, [f"{b:g}" for b in batches])
    axis.set_yticks([], minor=True)
    axis.set_ylabel("batch, requests")
    unread = first["shape"].topk * first["shape"].block_size
    if unread > contexts[0]:
        axis.axvspan(contexts[0] / 1.2, unread, color=FLOOR_COLOUR, alpha=0.12, linewidth=0)
        axis.annotate("no key is read", (unread / 1.04, 0.985), xycoords=("data", "axes fraction"), rotation=90, ha="right", va="top", fontsize=7, color=FLOOR_COLOUR)
    axis.set_xlim(contexts[0] / 1.2, contexts[-1] * 1.2)
    axis.set_ylim(batches[0] / 1.35, batches[-1] * 1.35)
    handles, _ = axis.get_legend_handles_labels()
    grey = dict(color=FLOOR_COLOUR, markerfacecolor="white", linestyle="none", markersize=6)
    handles += [
        Line2D([], [], marker="<", label="CP faster from the shortest measured", **grey),
        Line2D([], [], marker=">", label="TP faster up to the longest measured", **grey),
        Line2D([], [], marker="$?$", label="undecided", **grey), Line2D([], [], color=FLOOR_COLOUR, linewidth=2.4, alpha=0.4, label="95%"),
    ]  # fmt: skip
    fig.legend(handles=handles, loc="outside lower center", ncols=2)
    words = [first["source"], first["node"], f"P = {first['world']}", first["dtype"], f"{first['cache_state']} caches"]
    whole = filter(None, [f"{title}: {'  ·  '.join(map(str, words))}", frames.overlap_words(lines[0].pairs)])
    fig.suptitle("\n".join(whole), fontsize=10, x=0.01, ha="left")
    return fig


def panel(comparison: crossover.Comparison, title: str) -> Panel:
    """The map's panel of a comparison."""
    kind = "published" if comparison.source == "published" else "measured"
    name = arm_name({k: comparison.pairs[k].iloc[0] for k in crossover.VARIANT})
    return Panel(title, comparison.pairs, comparison.measured, comparison.model, kind, (name,))


@styled
def bandwidth_curve(
    curve: Sequence[dict[str, Any]], node: str, last_level_bytes: int, datasheet_gbs: float | None = None
) -> Figure:
    """Read rate against footprint, random and rising pages, with the last-level cache marked.

    Args:
        curve: entries of the node check: `footprint_bytes`, `order` ("random" or "sequential"), `gbs`.
        node: the machine, for the title.
        last_level_bytes: where the curve should bend.
        datasheet_gbs: the memory's rate in the vendor's data sheet; None draws no line.
    """
    fig = figure(6.2, 3.4)
    axis = fig.subplots()
    for order, colour, marker in (("random", CP_COLOUR, "s"), ("sequential", TP_COLOUR, "o")):
        mine = [c for c in curve if c["order"] == order]
        sizes = [c["footprint_bytes"] / 2**20 for c in mine]
        axis.plot(sizes, [c["gbs"] for c in mine], marker, color=colour, label=f"{order} pages, measured")
    axis.set_xscale("log", base=2)
    ticks = sorted({c["footprint_bytes"] / 2**20 for c in curve})
    axis.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axis.set_xticks([], minor=True)
    axis.axvline(last_level_bytes / 2**20, color=LINE_COLOUR, linewidth=1.0)
    axis.annotate(
        f"last-level cache, {last_level_bytes / 2**20:.0f} MiB", (last_level_bytes / 2**20, 0.02), xycoords=("data", "axes fraction"),
        rotation=90, ha="right", va="bottom", fontsize=8,
    )  # fmt: skip
    if datasheet_gbs:
        axis.axhline(datasheet_gbs, color=FLOOR_COLOUR, linestyle=":", label="memory, data sheet")
    axis.set_ylim(0, 1.15 * max([c["gbs"] for c in curve] + [datasheet_gbs or 0.0]))
    axis.set_xlabel("footprint read again and again, MiB")
    axis.set_ylabel("GB/s, one rank")
    axis.set_title(f"Read rate by footprint  ·  {node}", loc="left", fontsize=10)
    axis.legend(loc="best")
    return fig


@styled
def collective_latency(collectives: Sequence[dict[str, Any]], node: str) -> Figure:
    """Microseconds of an all-gather against its payload, one line of markers a world size, bars for all rounds.

    Args:
        collectives: entries of the node check: `world`, `payload_bytes` a rank, `us`, `samples_us`, `launch`.
        node: the machine, for the title.
    """
    fig = figure(6.2, 3.4)
    axis = fig.subplots()
    worlds = sorted({c["world"] for c in collectives})
    for number, world in enumerate(worlds):
        mine = [c for c in collectives if c["world"] == world]
        sizes = [c["payload_bytes"] / 1024 for c in mine]
        colour = (CP_COLOUR, TP_COLOUR, FLOOR_COLOUR, LINE_COLOUR)[number % 4]
        axis.plot(
            sizes,
            [c["us"] for c in mine],
            "so^D"[number % 4],
            color=colour,
            label=f"P = {world}, {mine[0]['launch']}, measured",
        )
        axis.vlines(
            sizes, [min(c["samples_us"]) for c in mine], [max(c["samples_us"]) for c in mine], color=colour, alpha=0.35
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = sorted({c["payload_bytes"] / 1024 for c in collectives})
    axis.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axis.set_xticks([], minor=True)
    axis.set_xlabel("payload a rank, KiB")
    axis.set_ylabel("µs an all-gather, slowest rank")
    axis.set_title(f"All-gather latency  ·  {node}", loc="left", fontsize=10)
    axis.legend(loc="best")
    return fig


@styled
def served(table: Any, title: str = "Change of time per output token, CP against TP") -> Figure:
    """Measured serving changes against what the layer's time predicts, with the line on which they would agree.

    Args:
        table: with source, concurrency, measured_ms, predicted_ms, predicted_low_ms and predicted_high_ms, as
            `serving.against_published` makes it.
        title: of the figure.

    Raises:
        ValueError: nothing to show.
    """
    if not len(table):
        raise ValueError("served: nothing to show, no row has a measured change")
    fig = figure(5.2, 5.0)
    axis = fig.subplots()
    ends = [*table["measured_ms"], *table["predicted_low_ms"], *table["predicted_high_ms"], 0.0]
    low, high = min(ends) - 0.06 * (max(ends) - min(ends)), max(ends) + 0.06 * (max(ends) - min(ends))
    axis.plot([low, high], [low, high], color=LINE_COLOUR, linewidth=1.0, label="prediction explains all of it")
    axis.axhline(0.0, color=FLOOR_COLOUR, linewidth=0.8)
    axis.axvline(0.0, color=FLOOR_COLOUR, linewidth=0.8)
    published = table["source"].str.startswith(("AgentX", "TPOT"))
    for mine, word, face in ((table[published], "published", "none"), (table[~published], "measured", CP_COLOUR)):
        if len(mine):
            axis.hlines(
                mine["measured_ms"],
                mine["predicted_low_ms"],
                mine["predicted_high_ms"],
                color=CP_COLOUR,
                linewidth=2.2,
                alpha=0.4,
            )
            axis.plot(
                mine["predicted_ms"],
                mine["measured_ms"],
                "s",
                color=CP_COLOUR,
                markerfacecolor=face,
                label=f"{word}; bar: 95% and the batches assumed",
            )
    for _, line in table.iterrows():
        axis.annotate(
            f"{line['concurrency']:g}",
            (line["predicted_ms"], line["measured_ms"]),
            (0, 6),
            textcoords="offset points",
            fontsize=7.5,
            ha="center",
        )
    axis.set_xlim(low, high)
    axis.set_ylim(low, high)
    axis.set_aspect("equal")
    axis.set_xlabel("predicted from the layer's time, ms a token")
    axis.set_ylabel("measured in serving, ms a token")
    axis.set_title(f"{title}\n(number: concurrency)", loc="left")
    fig.legend(loc="outside lower center", ncols=1)
    return fig


@styled
def regrets(found: Sequence[Any], title: str = "Loss against the oracle near break-even") -> Figure:
    """What always-TP, always-CP, the policy and its threshold lose to an oracle, with 95% intervals; a panel a truth.

    Args:
        found: of `advice.regret` and `advice.regret_measured`.
        title: of the figure.

    Raises:
        ValueError: nothing to show.
    """
    if not found:
        raise ValueError("regrets: nothing to show, no batch lies near break-even")
    fig = figure(3.6 * len(found) + 1.4, 2.6)
    axes = fig.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axis, each in zip(axes, found, strict=True):
        words = ["threshold" if name.startswith("threshold") else name for name in each.strategies]
        for y, (value, low, high) in enumerate(each.strategies.values()):
            axis.hlines(y, 100 * low, 100 * high, color=CP_COLOUR, linewidth=2.2, alpha=0.4)
            axis.plot(100 * value, y, "s", color=CP_COLOUR)
            axis.annotate(f"{100 * value:.2f}%", (100 * value, y), (0, 5), textcoords="offset points", fontsize=7.5, ha="center")
        axis.set_yticks(range(len(words)), words)
        axis.set_ylim(len(words) - 0.4, -0.7)
        axis.set_xlim(left=min(0.0, axis.get_xlim()[0]))
        axis.set_xlabel("loss against the oracle, % (bar: 95%)")
        axis.set_title(f"{each.steps} {each.truth} batches: {each.verdict}", loc="left", fontsize=8, wrap=True)
    fig.suptitle(title, x=0.01, ha="left")
    return fig


@styled
def layer_shares(bars: Sequence[tuple[str, str, Any]], title: str) -> Figure:
    """What a sparse layer's measured parts take, a bar a way to choose blocks, the indexer's share at its end.

    Args:
        bars: (shape in words, way in words, `layers.Share`), those of a shape one after another.
        title: of the figure.

    Raises:
        ValueError: no bar.
    """
    if not bars:
        raise ValueError("layer_shares: nothing to show, no row of the indexer has one of attention at its shape")
    y, at, shape = 0.0, [], None
    fig = figure(7.2, 0.9 + 0.21 * len(bars) + 0.08 * len({where for where, _, _ in bars}))
    axis = fig.subplots()
    for where, way, share in bars:
        y += 0.45 if shape not in (None, where) else 0.0
        shape = where
        left = 0.0
        indexer = CP_COLOUR if way.startswith("CP") else TP_COLOUR
        for us, colour, hatch in ((share.indexer_us, indexer, ""), (share.attention_us, "#8c8c8c", "//"), (share.projections_us or 0.0, "#d4d4d4", "..")):
            axis.barh(y, us, left=left, height=0.8, color=colour, hatch=hatch, edgecolor="white", linewidth=0.4)
            left += us
        axis.annotate(f"{share.share:.0%}", (left, y), (3, 0), textcoords="offset points", va="center", fontsize=7)
        at.append((y, f"{where}   {way}"))
        y += 1.0
    axis.set_yticks([v for v, _ in at], [words for _, words in at], fontsize=7)
    axis.set_ylim(y - 0.4, -0.6)
    axis.set_xlim(0, axis.get_xlim()[1] * 1.06)
    axis.set_xlabel("µs a layer and rank; at the end the indexer's share")
    axis.set_title(title, loc="left", fontsize=9)
    marks = [("indexer, TP", TP_COLOUR, ""), ("indexer, CP", CP_COLOUR, ""), ("attention over the choice", "#8c8c8c", "//"), ("projections", "#d4d4d4", "..")]
    axis.legend(handles=[Patch(facecolor=c, hatch=h, edgecolor="white", label=w) for w, c, h in marks], loc="lower right", fontsize=7)
    return fig
