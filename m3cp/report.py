"""The design review's figures and its page: one self-contained HTML file from notebooks/30_design_review.

What is said stands in `review`; here it is drawn, each figure with its claim, its prediction and its floor. Neither
torch nor triton is imported.
"""

from __future__ import annotations

import base64
import html
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from m3cp import advice, break_even_lines, crossover, fit, frames, plots, workload
from m3cp.crossover import tokens_about
from m3cp.review import Review, engines_text, floor_of, given, judged, pays_from, reference, who
from m3cp.terms import TERMS

WIDE = 9.6  # inches: a figure as wide as the page
# What a reader is told of the cost model's terms, bottom of the stack first: (colour, hatch), the explorer's colours.
READING, SMALL, CHOOSING = "reading keys at full bandwidth", "what small reads lose", "choosing blocks"
FIXED, EXCHANGE = "fixed: launch, hand-over", "exchange, where told apart"
STAGES = {
    READING: ("#56B4E9", ""),
    SMALL: ("#F0E442", "...."),
    CHOOSING: ("#009E73", "////"),
    FIXED: ("#6b6b6b", ""),
    EXCHANGE: ("#8a3d00", "xxxx"),
}


def stage_of(term: str) -> str:
    """The stage of `STAGES` that a term of the cost model belongs to: what is none of the others is work on the rows."""
    told = {"bytes": READING, "beyond": READING, "ramp": SMALL, "wave": SMALL, "bend": SMALL, "refill": SMALL, "unfilled": SMALL, "launch": FIXED}
    if term in told:
        return told[term]
    return EXCHANGE if TERMS[term].meaning.startswith("the exchange") else CHOOSING


@plots.styled
def gains(comparison: crossover.Comparison) -> Figure:
    """What CP saves over context, one panel a batch: measured, predicted, and the most that page reads allow.

    Args:
        comparison: with both fits.
    """
    pairs, tp, cp = comparison.pairs, comparison.tp, comparison.cp
    batches = sorted(set(pairs["batch"]))
    floors = floor_of(comparison)
    across = min(3, len(batches))
    down = math.ceil(len(batches) / across)
    fig = plots.figure(WIDE, 2.35 * down + 0.8)
    axes = fig.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    contexts = sorted(set(pairs["context_tokens"]))
    shape = cp.template.shape
    step = shape.block_size * cp.template.world
    first = shape.topk * shape.block_size + step
    lines = [c for c in crossover.context_grid(max(min(contexts), first), max(contexts), step, 81) if c >= first]
    for axis, batch in zip(axes.flat, batches, strict=False):
        mine = pairs[pairs["batch"] == batch].sort_values("context_tokens")
        best, drawn = crossover.difference(tp, cp, [(c, batch) for c in lines])
        axis.fill_between(
            lines, *np.percentile(-drawn, [2.5, 97.5], axis=0), color=plots.CP_COLOUR, alpha=0.15, linewidth=0
        )
        axis.plot(lines, -best, color=plots.CP_COLOUR, linestyle=(0, (5, 2)), linewidth=1.1)
        most = [(c, floors[c, batch][0] - floors[c, batch][1]) for c in mine["context_tokens"] if (c, batch) in floors]
        if most:
            axis.plot(*zip(*most, strict=True), "_", color=plots.FLOOR_COLOUR, markersize=10, markeredgewidth=1.6)
        axis.axhline(0.0, color=plots.LINE_COLOUR, linewidth=0.9, zorder=1)
        axis.vlines(
            mine["context_tokens"],
            -mine["delta_high"],
            -mine["delta_low"],
            color=plots.CP_COLOUR,
            linewidth=2.6,
            alpha=0.4,
        )
        axis.plot(mine["context_tokens"], -mine["delta_us"], "s", color=plots.CP_COLOUR, zorder=3)
        axis.set_title(f"batch {batch}", loc="left", fontweight="bold")
        plots.context_axis(axis, contexts)
        axis.tick_params(labelbottom=True)
        axis.set_xlabel("context, tokens a request" if axis in axes[-1] else "")
    for axis in axes.flat[len(batches) :]:
        axis.set_visible(False)
    low, high = 1.25 * min(-pairs["delta_us"].max(), -2.0), 1.4 * max(-pairs["delta_us"].min(), 4.0)
    axes[0, 0].set_yscale("symlog", linthresh=4.0, linscale=1.2)
    axes[0, 0].set_ylim(low, high)
    ticks = [
        t for t in (-400, -100, -40, -10, -4, -2, 0, 2, 4, 10, 40, 100, 400, 1000, 4000, 10_000) if low <= t <= high
    ]
    axes[0, 0].set_yticks(ticks, [f"{t:+d}" if t else "0" for t in ticks])
    axes[0, 0].set_yticks([], minor=True)
    for line in axes:
        line[0].set_ylabel("saved by CP, µs a layer")
    handles = [
        Line2D([], [], color=plots.CP_COLOUR, marker="s", linestyle="none"),
        (Patch(facecolor=plots.CP_COLOUR, alpha=0.15), Line2D([], [], color=plots.CP_COLOUR, linestyle=(0, (5, 2)))),
        Line2D([], [], color=plots.FLOOR_COLOUR, marker="_", markersize=10, markeredgewidth=1.6, linestyle="none"),
    ]
    words = [
        "measured (above 0: CP faster), bar: 95%",
        "predicted by the cost model, 95%",
        "most that the bytes allow: page read TP - CP, measured",
    ]
    fig.legend(handles, words, loc="outside lower center", ncols=2)
    return fig


def parts(model: fit.CostModel, context_tokens: int, batch: int) -> dict[str, float]:
    """A call's predicted microseconds by stage of `STAGES`; they add up to the prediction."""
    point = model.point(context_tokens, batch)
    found = dict.fromkeys(STAGES, 0.0)
    for term, us in zip(model.terms, model.row(point) * model.fit.usable, strict=True):
        found[stage_of(term)] += float(us)
    return found


@plots.styled
def breakdown(comparison: crossover.Comparison) -> Figure:
    """Where a layer's microseconds go at the reference points: modelled parts, measured total, measured page read."""
    points = reference(comparison)
    floors = floor_of(comparison)
    fig = plots.figure(WIDE, 0.98 * len(points) + 1.1)
    axes = np.atleast_1d(fig.subplots(len(points), 1))
    used = set()
    for axis, (_, pair) in zip(axes, points.iterrows(), strict=True):
        where = (int(pair["context_tokens"]), int(pair["batch"]))
        for place, (model, us) in enumerate(((comparison.cp, pair["cp_us"]), (comparison.tp, pair["tp_us"]))):
            left = 0.0
            for stage, us_part in parts(model, *where).items():
                if us_part > 0:
                    colour, hatch = STAGES[stage]
                    axis.barh(
                        place,
                        us_part,
                        left=left,
                        color=colour,
                        hatch=hatch,
                        edgecolor="white",
                        linewidth=0.5,
                        height=0.62,
                    )
                    left += us_part
                    used.add(stage)
            axis.plot(
                us,
                place,
                "s" if place == 0 else "o",
                color=plots.CP_COLOUR if place == 0 else plots.TP_COLOUR,
                markeredgecolor="white",
                markersize=6,
                zorder=4,
            )
            if where in floors:
                tick = [floors[where][1 - place]] * 2, [place - 0.42, place + 0.42]
                axis.plot(*tick, color="white", linewidth=3.6, zorder=3.9)
                axis.plot(*tick, color=plots.LINE_COLOUR, linewidth=1.6, zorder=4)
        axis.set_yticks([0, 1], ["CP", "TP"])
        axis.set_ylim(-0.55, 1.55)
        axis.set_xlim(0, 1.06 * max(pair["tp_us"], pair["cp_us"]))
        axis.grid(False, axis="y")
        axis.set_ylabel(
            f"{where[1]} ×\n{tokens_about(where[0])}", rotation=0, ha="right", va="center", fontweight="bold"
        )
    axes[-1].set_xlabel("µs a layer (requests × context at the left; each row its own scale)")
    handles = [Patch(facecolor=c, hatch=h, edgecolor="white") for s, (c, h) in STAGES.items() if s in used]
    words = [f"{s}, modelled" for s in STAGES if s in used]
    handles += [Line2D([], [], color=plots.TP_COLOUR, marker="o", linestyle="none"), Line2D([], [], color=plots.CP_COLOUR, marker="s", linestyle="none"),
                Line2D([], [], color=plots.LINE_COLOUR, marker="|", markersize=11, markeredgewidth=1.6, linestyle="none")]  # fmt: skip
    words += ["TP, measured", "CP, measured", "page read, measured floor"]
    fig.legend(handles, words, loc="outside lower center", ncols=3)
    return fig


@plots.styled
def scaling(found: Review) -> Figure | None:
    """Microseconds over the number of ranks at up to three points: floors and arms measured, other P modelled.

    Returns:
        None where page reads were measured at fewer than three numbers of ranks.
    """
    rows = frames.timed(found.run.frame)
    first = found.choices[0].first
    rows = rows[
        (rows["mix"] == "uniform") & (rows["dtype"] == first["dtype"]) & (rows["query_len"] == first["query_len"])
    ]
    reads = rows[(rows["arm"] == "page_read") & (rows["bytes_read"] > 0)]
    wide = [where for where, part in reads.groupby(["context_tokens", "batch"]) if part["world"].nunique() > 2]
    wide = sorted(wide, key=lambda where: where[0] * where[1])
    if not wide:
        return None
    places = sorted({0, len(wide) // 2, len(wide) - 1})
    fig = plots.figure(WIDE, 3.7)
    axes = np.atleast_1d(fig.subplots(1, len(places)))
    handles: dict[str, Any] = {}
    for axis, place in zip(axes, places, strict=True):
        context, batch = wide[place]
        here = rows[(rows["context_tokens"] == context) & (rows["batch"] == batch)]
        worlds = sorted(set(reads[(reads["context_tokens"] == context) & (reads["batch"] == batch)]["world"]))
        floor = here[here["arm"] == "page_read"].groupby("world")["median_us"].median()
        axis.plot(
            range(len(worlds)),
            [floor[w] for w in worlds],
            "_",
            color=plots.FLOOR_COLOUR,
            markersize=16,
            markeredgewidth=1.8,
        )
        handles["page read of 1/P, measured floor"] = Line2D(
            [], [], color=plots.FLOOR_COLOUR, marker="_", markersize=12, markeredgewidth=1.8, linestyle="none"
        )
        for arm, colour, marker, shift, word in (
            ("tp", plots.TP_COLOUR, "o", -0.12, "TP"), ("cp", plots.CP_COLOUR, "s", 0.12, "CP"), ("cp_local", "#009E73", "D", 0.0, "CP without exchange"),
        ):  # fmt: skip
            mine = here[(here["arm"] == arm) & (here["form"] == given(first["form"]))]
            if arm == "cp":
                mine = mine[
                    (mine["queries"] == first["queries"])
                    & (mine["exchange"] == first["exchange"])
                    & mine["threshold_blocks"].isna()
                ]
            medians = mine.groupby("world")["median_us"].median()
            known = [w for w in worlds if w in medians.index]
            if known:
                axis.plot(
                    [worlds.index(w) + shift for w in known],
                    [medians[w] for w in known],
                    marker,
                    color=colour,
                    zorder=4,
                )
                handles[f"{word}, measured"] = Line2D([], [], color=colour, marker=marker, linestyle="none")
            if arm != "cp":
                continue
            for w in (w for w in worlds if w > 1 and w not in known):
                guess = wider(found.main.cp, context, batch, w)
                axis.errorbar(worlds.index(w) + shift, guess.us, [[guess.us - guess.low_us], [guess.high_us - guess.us]], fmt=marker, color=colour,
                              markerfacecolor="none", elinewidth=1.0, capsize=3, ecolor=colour, linestyle="none", zorder=3)  # fmt: skip
                handles["CP, modelled; a further peer's cost assumed, 95%"] = Line2D(
                    [], [], color=colour, marker=marker, markerfacecolor="none", linestyle="none"
                )
        tp = found.main.tp
        axis.axhline(
            tp.us(tp.point(context, batch)), color=plots.TP_COLOUR, linestyle=(0, (5, 2)), linewidth=1.0, zorder=1
        )
        handles["TP, modelled: reads all of it at any P"] = Line2D(
            [], [], color=plots.TP_COLOUR, linestyle=(0, (5, 2)), linewidth=1.0
        )
        axis.set_xticks(range(len(worlds)), [f"{w}" for w in worlds])
        axis.set_xlim(-0.5, len(worlds) - 0.5)
        axis.set_ylim(0, None)
        axis.set_xlabel("ranks, P")
        axis.set_title(f"{batch} × {tokens_about(context)} tokens", loc="left", fontsize=9, fontweight="bold")
    axes[0].set_ylabel("µs a layer")
    fig.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2)
    return fig


def wider(model: fit.CostModel, context_tokens: int, batch: int, world: int) -> fit.Prediction:
    """CP's microseconds at another number of ranks: known bytes, and the stated prior for each further peer."""
    if "peers" in model.fit.unidentified:
        model = fit.assume(model, {"peers": fit.PEER_US[model.template.exchange or "collective"]})
    return model.predict(model.point(context_tokens, batch, world=world))


@plots.styled
def every_arm(found: Review) -> Figure:
    """Every measured way to run the indexer at up to three points, by name, over the floors of TP and CP."""
    names = ("world", "dtype", "query_len", "cache", "launch", "boundary")
    rows = frames.timed(found.run.frame)
    first = found.choices[0].first
    same = (rows["mix"] == "uniform") & (rows["arm"].isin([*crossover.BASELINE, *crossover.BASELINE.values()]))
    for name in names:
        same &= rows[name] == first[name]
    rows = rows[same & (rows["rows_padded"] == 0) & (rows["shared_prefix_tokens"] == 0)]
    rows = rows.assign(
        path_name=[("CP: " if r["arm"].endswith("cp") else "TP: ") + who(r, rows) for _, r in rows.iterrows()]
    )
    rows = _one_bound(rows)
    where = rows.groupby(["context_tokens", "batch"])["path_name"].nunique()
    best = sorted(where[where == where.max()].index, key=lambda w: w[0] * w[1])
    best = [
        w for w in best if rows[(rows["context_tokens"] == w[0]) & (rows["batch"] == w[1])]["bytes_read"].min() > 0
    ] or best
    chosen = [best[i] for i in sorted({min(1, len(best) - 1), len(best) // 2, len(best) - 1})]
    rows = rows[[(c, b) in chosen for c, b in zip(rows["context_tokens"], rows["batch"], strict=True)]]
    order = sorted(set(rows["path_name"]), key=lambda n: (n.startswith("CP"), "m3cp" not in n, n), reverse=True)
    fig = plots.figure(10.2, 0.3 * len(order) + 1.5)
    axes = np.atleast_1d(fig.subplots(1, len(chosen), sharey=True))
    floors = floor_of(found.main)
    for axis, (context, batch) in zip(axes, chosen, strict=True):
        here = rows[(rows["context_tokens"] == context) & (rows["batch"] == batch)]
        for _, row in here.iterrows():
            y, cp = order.index(row["path_name"]), row["arm"].endswith("cp")
            colour = plots.CP_COLOUR if cp else plots.TP_COLOUR
            axis.hlines(y, min(row["samples_us"]), max(row["samples_us"]), color=colour, linewidth=2.6, alpha=0.35)
            axis.plot(row["median_us"], y, "s" if cp else "o", color=colour, zorder=3)
            best = row["extra"].get("best")
            if best:
                axis.plot(best["median_us"], y, "D", color=colour, markerfacecolor="white", markersize=4, zorder=4)
            axis.annotate(f"{row['median_us']:.1f}", (row["median_us"], y), (5, 0), textcoords="offset points", va="center", fontsize=7.5,
                          bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.8})  # fmt: skip
        for us, colour in zip(floors.get((context, batch), ()), (plots.TP_COLOUR, plots.CP_COLOUR), strict=False):
            axis.axvline(us, color=colour, linewidth=1.4, alpha=0.8, zorder=0)
        axis.set_xlim(0, 1.22 * here["median_us"].max())
        axis.set_ylim(-0.6, len(order) - 0.4)
        axis.set_yticks(range(len(order)), order)
        axis.set_xlabel("µs a layer")
        axis.set_title(f"{batch} × {tokens_about(context)} tokens", loc="left", fontsize=9, fontweight="bold")
    handles = [Line2D([], [], color=plots.TP_COLOUR, marker="o", linestyle="none"), Line2D([], [], color=plots.CP_COLOUR, marker="s", linestyle="none"),
               Line2D([], [], color=plots.TP_COLOUR, linewidth=1.4), Line2D([], [], color=plots.CP_COLOUR, linewidth=1.4)]  # fmt: skip
    words = [
        "TP, measured",
        "CP, measured",
        "page read of TP's bytes, measured floor",
        "page read of CP's bytes, measured floor",
    ]
    if any(extra.get("best") for extra in rows["extra"]):
        handles.append(
            Line2D([], [], color=plots.LINE_COLOUR, marker="D", markerfacecolor="white", markersize=4, linestyle="none")
        )
        words.append("an engine at its best launch settings, measured")
    fig.legend(handles, words, loc="outside lower center", ncols=4 if len(words) == 4 else 3)
    return fig


def _one_bound(rows: Any) -> Any:
    """Rows at one bound of the context, an engine's where there is one; what was measured at others only says so."""
    engine = rows[~rows["arm"].isin(["tp", "cp"])]
    bound = (engine if len(engine) else rows)["max_context"].mode()[0]
    at = ["context_tokens", "batch", "path_name"]
    known = set(map(tuple, rows[rows["max_context"] == bound][at].to_numpy()))
    kept = [row["max_context"] == bound or tuple(row[at]) not in known for _, row in rows.iterrows()]
    names = [
        n if b == bound else f"{n} (bound {tokens_about(b)})"
        for n, b in zip(rows["path_name"], rows["max_context"], strict=True)
    ]
    return rows.assign(path_name=names)[kept]


@plots.styled
def beside_published(found: Review) -> Figure:
    """TP / CP over the bytes that TP reads a rank: this node filled, published hollow, each with its own ceiling P."""
    others = crossover.comparisons(frames.published(), noise=0.05, draws=50)
    theirs = crossover.headline(others)
    fig = plots.figure(WIDE, 4.3)
    axis = fig.subplots()
    shown = (
        found.choices[:1]
        + tuple(c for c in found.choices[1:] if c.first["form"] == "staged" and c.first["queries"] == "gathered")[:1]
    )
    sets = [(f"measured: {found.where}, {c.comparison.pairs['cache_state'].mode()[0]}; {c.name}", c.comparison.pairs, colour, marker, colour)
            for c, colour, marker in zip(shown, (plots.CP_COLOUR, "#009E73"), ("s", "D"), strict=False)]  # fmt: skip
    kind = theirs.pairs.iloc[0]
    sets.append(
        (
            f"published: {kind['node']}, P = {kind['world']}, {kind['dtype']}, warm; SGLang's kernels",
            theirs.pairs,
            plots.LINE_COLOUR,
            "o",
            "none",
        )
    )
    low, high = math.inf, 0.0
    for name, pairs, colour, marker, face in sets:
        pairs = pairs[pairs["read"]]
        megabytes = [
            c * b * s.key_bytes(d) / s.block_size / 1e6
            for c, b, s, d in zip(pairs["context_tokens"], pairs["batch"], pairs["shape"], pairs["dtype"], strict=True)
        ]
        axis.plot(megabytes, pairs["ratio"], marker, color=colour, markerfacecolor=face, label=name, zorder=3)
        low, high = min(low, *megabytes), max(high, *megabytes)
    axis.axhline(1.0, color=plots.LINE_COLOUR, linewidth=0.9)
    for world, words in ((int(found.choices[0].first["world"]), "this node"), (int(kind["world"]), "published")):
        axis.axhline(world, color=plots.FLOOR_COLOUR, linestyle=":", linewidth=1.0)
        axis.annotate(
            f"P = {world}: if only bytes counted ({words})",
            (low, world),
            (0, 3),
            textcoords="offset points",
            fontsize=7.5,
            color=plots.FLOOR_COLOUR,
        )
    axis.set_xscale("log")
    sizes = [10**e for e in range(-3, 7) if low / 3 <= 10**e <= high * 3]
    axis.set_xticks(sizes, [f"{v:g}" for v in sizes])
    axis.set_xticks([], minor=True)
    axis.set_yscale("log", base=2)
    axis.set_yticks([0.25, 0.5, 1, 2, 4], ["0.25", "0.5", "1: even", "2", "4"])
    axis.set_ylim(0.22, 5.2)
    axis.set_xlabel("index keys that a TP rank reads a layer and step, MB")
    axis.set_ylabel("TP / CP (above 1: CP faster)")
    fig.legend(loc="outside lower center", ncols=1)
    return fig


@plots.styled
def traffic_map(found: Review) -> Figure:
    """The traffic's decode steps over the node's break-even line, and how much CP saves in each.

    Raises:
        ValueError: a review without traffic, or without a policy for the first choice.
    """
    choice = found.choices[0]
    if not found.steps or choice.policy is None:
        raise ValueError(f"traffic_map: needs a traffic and a policy ({choice.why})")
    first = choice.first
    key = (int(first["world"]), str(first["dtype"]), int(first["query_len"]))
    batches = [[n for n in step.context_lengths if n] for step in found.steps]
    batches = [b for b in batches if b]
    decided = [choice.policy.decide(b, *key) for b in batches]
    mean, size = np.array([np.mean(b) for b in batches]), np.array([len(b) for b in batches])
    fig = plots.figure(WIDE, 3.9)
    left, right = fig.subplots(1, 2, width_ratios=(1.25, 1))
    for word, colour, marker, mine in (
        ("CP faster", plots.CP_COLOUR, "s", [d.path == "cp" and not d.refused for d in decided]),
        ("TP faster", plots.TP_COLOUR, "o", [d.path == "tp" and not d.refused for d in decided]),
        ("outside what was measured", plots.FLOOR_COLOUR, "x", [d.refused for d in decided]),
    ):
        mine = np.array(mine)
        if mine.any():
            left.plot(
                mean[mine],
                size[mine],
                marker,
                color=colour,
                alpha=0.55,
                markersize=4,
                markeredgewidth=0.8 if marker == "x" else 0,
                label=f"{word}: {int(mine.sum())} steps",
            )
    known = [a for a in found.main.measured if a.value and a.answer == "crosses"]
    left.plot(
        [a.value for a in known],
        [a.at for a in known],
        "-",
        color=plots.LINE_COLOUR,
        marker="D",
        markersize=4,
        markerfacecolor="white",
        label="break-even, measured, equal lengths",
    )
    ends = [*mean, *(a.value for a in known)]
    ticks = [2**e for e in range(10, 21) if min(ends) / 2 <= 2**e <= 2 * max(ends)]
    plots.context_axis(left, ticks)
    left.set_xlim(min(ends) / 1.6, max(ends) * 1.6)
    left.set_yscale("log", base=2)
    top = max(int(size.max()), *(int(a.at) for a in known)) if known else int(size.max())
    steps = [2**e for e in range(0, 9) if 2**e <= 1.5 * top]
    left.set_yticks(steps, [str(s) for s in steps])
    left.set_yticks([], minor=True)
    left.set_xlabel("mean context of a step, tokens a request")
    left.set_ylabel("requests decoding in the step")
    left.set_title("The traffic's steps on this node", loc="left")
    saved = np.sort([d.gain_us for d in decided if not d.refused])
    if len(saved):
        share = 100 * (np.arange(len(saved)) + 0.5) / len(saved)
        right.plot(saved, share, color=plots.CP_COLOUR, linestyle=(0, (5, 2)))
        right.axvline(0.0, color=plots.LINE_COLOUR, linewidth=0.9)
        right.axvline(saved.mean(), color=plots.FLOOR_COLOUR, linewidth=1.0, linestyle=":")
        right.annotate(f" mean {saved.mean():+.1f}", (saved.mean(), 4), fontsize=8, color=plots.FLOOR_COLOUR)
    right.set_ylim(0, 100)
    right.set_xlabel("saved by CP, µs a layer, modelled (above 0: CP faster)")
    right.set_ylabel("steps up to there, %")
    right.set_title("How much it saves", loc="left")
    handles, labels = left.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)))
    return fig


@plots.styled
def where_map(comparison: crossover.Comparison, title: str) -> Figure:
    """The map of the answer, one panel."""
    return plots.maps([plots.panel(comparison, title)])


def arms_over_context(comparison: crossover.Comparison, batches: int = 3) -> Figure:
    """Both arms over context with fit, limit and page read at a few of the batches that reach the longest context."""
    longest = comparison.pairs.groupby("batch")["context_tokens"].max()
    every = sorted(int(b) for b in longest[longest == longest.max()].index)
    kept = {every[round(i * (len(every) - 1) / max(1, batches - 1))] for i in range(min(batches, len(every)))}
    return plots.curves(comparison.frame[comparison.frame["batch"].isin(kept)], comparison.models)


def says_map(found: Review) -> tuple[str, str]:
    """Of the map."""
    total, each = pays_from(found.main)
    claim = {
        "never": "TP is faster at every measured point.",
        "always": "CP is faster wherever keys are read.",
        "undecided": "The measured points do not tell where CP begins to win.",
    }
    note = "Each cell is measured: who is faster, by what factor. Solid line: break-even between measured neighbours, bars 95%; dashed line and band: the cost model's."
    return claim.get(total, f"CP pays from about {total} cached tokens a step: {each}."), note


def says_gains(found: Review) -> tuple[str, str]:
    """Of the gains: the share of what the bytes allow that CP gets, and how far the prediction is off."""
    floors, tp, cp = floor_of(found.main), found.main.tp, found.main.cp
    lines = [
        (p, floors.get((int(p["context_tokens"]), int(p["batch"]))))
        for _, p in found.main.pairs[found.main.pairs["read"]].iterrows()
    ]
    shares = [(-p["delta_us"] / (f[0] - f[1]), p) for p, f in lines if f and f[0] > f[1]]
    misses = [
        abs(
            tp.us(tp.point(p["context_tokens"], p["batch"]))
            - cp.us(cp.point(p["context_tokens"], p["batch"]))
            + p["delta_us"]
        )
        for p, _ in lines
    ]
    note = (
        f"The prediction misses the measured difference by {np.median(misses):.2f} µs at the median. Where no key is read the "
        "model says nothing. Up to ±4 µs the scale is linear, beyond it logarithmic."
    )
    if not shares:
        return "CP's gain grows with the bytes it does not read.", note
    share, pair = max(shares, key=lambda s: s[1]["context_tokens"] * s[1]["batch"])
    return (
        f"CP's gain grows with the bytes it does not read, to {100 * share:.0f}% of what page reads allow ({pair['batch']} × {tokens_about(pair['context_tokens'])}).",
        note,
    )


def says_arms(found: Review) -> tuple[str, str]:
    """Of the two arms over context: how far each is above its floor."""
    floors = floor_of(found.main)
    over = {"TP": [], "CP": []}
    for _, pair in found.main.pairs[found.main.pairs["read"]].iterrows():
        floor = floors.get((int(pair["context_tokens"]), int(pair["batch"])))
        if floor:
            over["TP"].append(pair["tp_us"] - floor[0])
            over["CP"].append(pair["cp_us"] - floor[1])
    note = "Microseconds of the slowest rank, medians of all rounds; dashed: the fit. Limit: bytes over the best page-read bandwidth, computed."
    if not over["TP"]:
        return "Both arms grow with the bytes they read.", note
    words = [f"{arm} {np.median(v):.1f} µs" for arm, v in over.items()]
    return f"Above their page reads: {' and '.join(words)} at the median; the rest is bytes.", note


def says_breakdown(found: Review) -> tuple[str, str]:
    """Of the breakdown: what CP adds and what it halves."""
    pair = reference(found.main).iloc[0]
    where = (int(pair["context_tokens"]), int(pair["batch"]))
    tp, cp = parts(found.main.tp, *where), parts(found.main.cp, *where)
    claim = f"CP's price is fixed, {cp[FIXED] - tp[FIXED]:+.1f} µs a call; it reads 1/P of TP's bytes."
    loose = sorted({t for m in found.main.models for t in m.fit.unidentified if t in ("exchange", "sent", "beyond")})
    note = "Parts are the fitted terms of the cost model; they add up to its prediction, not to the measured mark beside them."
    if loose:
        note += f" These rows do not tell apart: {', '.join(loose)}; their cost is within the other parts."
    return claim, note


def says_scaling(found: Review) -> tuple[str, str]:
    """Of scaling in P."""
    prior = fit.PEER_US[found.main.cp.template.exchange or "collective"]
    worlds = ", ".join(map(str, sorted(found.main.cp.worlds)))
    claim = f"More ranks read less each: measured at P = {worlds}, beyond that modelled."
    note = f"Hollow marks rest on known bytes and an assumed {prior.mean:g} ± {prior.deviation:g} µs for each further peer ({prior.why}); nobody measured them here."
    return claim, note


def says_break_even(found: Review, lines: list[break_even_lines.MeasuredLine]) -> tuple[str, str]:
    """Claim and note of the measured break-even lines."""
    ours = lines[0]
    answers = [a for a in ours.answers if a.answer == "crosses" and a.value]
    most = max(answers, key=lambda a: a.value, default=None)
    where = f"from {crossover.tokens_about(most.value)} tokens at batch {most.at:.0f}" if most else "at no measured batch in between"
    return (
        f"{ours.name} is no slower than TP {where}; engines' kernels stand beside it.",
        "Measured, interpolated between contexts; a batch without a crossing breaks the line. " + break_even_lines.line_table(lines)[2],
    )


def says_engines(found: Review) -> tuple[str, str]:
    """Of the engines."""
    claim = f"Kernels and collectives told apart: break-even is at {pays_from(found.main)[0]} tokens a step for {found.choices[0].name}"
    others = [
        f"{pays_from(c.comparison)[0]} for {c.name}" for c in found.choices[1:] if c.first["queries"] == "gathered"
    ][:2]
    note = engines_text(found) + " Gathered is to be compared with gathered. Bars: all rounds."
    return "; ".join([claim, *others]) + ".", note


def says_published(found: Review) -> tuple[str, str]:
    """Of the published figures beside ours."""
    note = (
        "Hollow: SGLang's authors, 2026-09-28, medians without samples, warm caches; other hardware, P, dtype and cache state, "
        "so levels are not to be compared: the shape is. A rank's reads decide, and a fixed cost decides where the curve starts."
    )
    theirs = crossover.headline(crossover.comparisons(frames.published(), noise=0.05, draws=50)).pairs
    best = [
        f"{pairs['ratio'].max():.2f} of {pairs['world'].iloc[0]} {word}"
        for pairs, word in ((found.main.pairs, "here"), (theirs, "published"))
    ]
    return f"One shape on both nodes: CP loses on few bytes and gains on many, at most {' and '.join(best)}.", note


def says_traffic(found: Review) -> tuple[str, str]:
    """Of the traffic."""
    answer = judged(found, found.choices[0])
    regret = None
    if answer.steps:
        first = found.choices[0].first
        regret = advice.regret(
            found.choices[0].policy,
            [s.context_lengths for s in found.steps],
            int(first["world"]),
            str(first["dtype"]),
            int(first["query_len"]),
            draws=200,
        )
    shared = sum(s.distinct_tokens for s in found.steps) / max(1, sum(sum(s.context_lengths) for s in found.steps))
    note = "Left: steps at their mean context; the policy judges each by all of its lengths. "
    note += regret.text.split(". ")[-1] if regret else ""
    if shared < 0.95:
        note += (
            f" Requests share prefixes: {shared:.0%} of the cached tokens are distinct, and all of them are counted."
        )
    return f"{found.traffic}: {answer.text[0].upper()}{answer.text[1:]}.", note


class Figures:
    """Saves the page's figures under numbers and wraps each with its claim; one object a page.

    Args:
        found: whose run stamps them.
        folder: for the SVG and PNG files; "" keeps none and embeds only.
    """

    def __init__(self, found: Review, folder: Path | str):
        self.found, self.folder, self.count = found, Path(folder), 0

    def show(self, fig: Figure, name: str, claim: str, note: str = "") -> str:
        """Save a figure as SVG and PNG, and return it as HTML: numbered, the claim in bold, what the marks are below."""
        self.count += 1
        saved = plots.save(fig, f"{self.count:02d}_{name}", self.found.run.name, self.found.run.commit, self.folder)
        data = base64.b64encode(saved[0].read_bytes()).decode()
        caption = f"<b>Figure {self.count}. {html.escape(claim)}</b> {html.escape(note)}"
        image = f"<img src='data:image/svg+xml;base64,{data}' alt='{html.escape(claim, quote=True)}'>"
        return f"<figure id='{name}'>{image}<figcaption>{caption}</figcaption></figure>"


STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; color: #1d1d1d; background: #fff;
  max-width: 62rem; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.65rem; line-height: 1.25; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2.1rem 0 .4rem;
  border-bottom: 1px solid #d8d8d8; padding-bottom: .2rem; } p { margin: .5rem 0; max-width: 50rem; }
.answer { border-left: 5px solid #D55E00; background: #faf6f2; padding: .9rem 1.2rem; margin: 1rem 0; }
.answer .verdict { font-size: 1.28rem; font-weight: 650; line-height: 1.35; margin: 0 0 .7rem; max-width: none; }
dl { display: grid; grid-template-columns: 6.5rem 1fr; gap: .35rem .8rem; margin: 0; } dt { font-weight: 600; color: #555; }
dd { margin: 0; } figure { margin: 1.2rem 0 1.6rem; page-break-inside: avoid; break-inside: avoid; }
figure img { max-width: 100%; height: auto; display: block; } figcaption { font-size: .88rem; color: #444; max-width: 50rem;
  margin-top: .3rem; } figcaption b { color: #1d1d1d; }
table { border-collapse: collapse; font-size: .86rem; margin: .7rem 0; } th, td { text-align: left; vertical-align: top;
  padding: .3rem .75rem .3rem 0; border-bottom: 1px solid #e6e6e6; font-variant-numeric: tabular-nums; }
td.n { white-space: nowrap; } table:has(th:nth-child(6)) td.n { white-space: normal; } .table { overflow-x: auto; } thead th { border-bottom: 1.5px solid #888; } tbody td:first-child { font-weight: 550; min-width: 7rem; }
.wide td:first-child { min-width: 17rem; } code { font: .92em ui-monospace,
  "SF Mono", Menlo, Consolas, monospace; background: #f3f3f3; padding: .1rem .3rem; border-radius: 3px; }
.note { font-size: .84rem; color: #555; } li { margin: .25rem 0; max-width: 50rem; } a.anchor-link { display: none; }
@media print, (max-width: 62rem) { td.n { white-space: normal; } .wide td:first-child { min-width: 9rem; }
  table { font-size: .78rem; } }
@media print { body { margin: 0; max-width: none; font-size: 9pt; } h1 { font-size: 15pt; } .answer .verdict {
  font-size: 12pt; } table { font-size: 7.5pt; } code { overflow-wrap: anywhere; } .table { overflow: visible; } tr {
  break-inside: avoid; } p, li, figcaption { max-width: none; } h2 { break-after: avoid; } .answer {
  -webkit-print-color-adjust: exact; print-color-adjust: exact; } }
"""


def page(executed: Path | str, out: Path | str, title: str) -> Path:
    """Turn an executed notebook into one self-contained HTML file without code, prompts or anything to fetch.

    Args:
        executed: the notebook; cells tagged "hidden" are left out whole.
        out: the file to write.
        title: of the page.
    """
    import nbformat
    from nbconvert import HTMLExporter
    from traitlets.config import Config

    config = Config()
    config.HTMLExporter.preprocessors = ["nbconvert.preprocessors.TagRemovePreprocessor"]
    config.TagRemovePreprocessor.remove_cell_tags = {"hidden", "parameters", "injected-parameters"}
    exporter = HTMLExporter(
        config=config, template_name="basic", exclude_input=True, exclude_input_prompt=True, exclude_output_prompt=True
    )
    body, _ = exporter.from_notebook_node(nbformat.read(str(executed), as_version=4))
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    head = f"<meta charset='utf-8'><meta name='viewport' content='width=device-width, initial-scale=1'><title>{html.escape(title)}</title>"
    out.write_text(
        f"<!doctype html>\n<html lang='en'><head>{head}<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )
    return out


def main(node: str = "", traffic: Path | str | None = None, out: Path | str | None = None) -> list[str]:
    """What `m3cp report` does: run notebooks/30_design_review, write the page; returns the lines to print.

    Args:
        node: a recorded node's or a run's name or folder; "" for `frames.default_node`.
        traffic: JSON lines of context lengths a step (`workload.read`), or None.
        out: folder for report.html, figures/ and the executed notebook; None is data/runs/<name>/report.

    Raises:
        FileNotFoundError, ValueError, NotebookFailed: in words, as the functions called do.
    """
    from m3cp.notebook import run_notebook

    started_s = time.monotonic()
    folder = Path(frames.find_run(node or frames.default_node())).resolve()
    if traffic:
        workload.read(traffic)  # a bad line is told before anything starts
    out = Path(out).resolve() if out else frames.ROOT / "data" / "runs" / folder.name / "report"
    figures = out / "figures"
    for old in figures.glob("[0-9][0-9]_*.*"):  # numbered: what an earlier page had is not mixed in
        old.unlink()
    parameters = {
        "run": str(folder),
        "traffic": str(Path(traffic).resolve()) if traffic else "",
        "figures": str(figures),
    }
    executed = run_notebook("30_design_review", parameters, out=out / "30_design_review.ipynb")
    written = page(executed, out / "report.html", f"m3cp design review: {folder.name}")
    drawn = sorted(figures.glob("*.svg"))
    lines = [f"{written}", f"{figures}: {len(drawn)} figures, each as SVG and PNG"]
    return lines + [f"from the rows of {folder.name} in {time.monotonic() - started_s:.0f} s"]
