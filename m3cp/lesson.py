"""The walkthrough's toy cache and its pictures: what the indexer does, for someone who has never seen it.

`toy` makes the tensors (it imports torch); the pictures take plain arrays and draw what they are given, so that what is
taught is what the package computed. `by_hand` is the cost model as one would draw it on a whiteboard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import ConnectionPatch, Patch, Rectangle

from m3cp import crossover, fit, frames, plots
from m3cp.shapes import IndexerShape
from m3cp.shard import Shard

RANK_COLOURS = (
    "#009E73",
    "#E69F00",
    "#CC79A7",
    "#56B4E9",
    "#8c8c8c",
    "#F0E442",
    "#a86f00",
    "#00583f",
)  # not TP's, not CP's
RANK_HATCHES = ("", "////", "....", "xxxx", "----", "\\\\\\\\", "++", "oo")
CHOSEN = "#000000"


def toy(shape: IndexerShape, tokens: int, seed: int = 3) -> tuple[Any, Any, Any, Any]:
    """One request on a small pool: queries of all heads, cache, block table and lengths, ready for `m3cp.reference`.

    Values are multiples of 1/8, so that every order of summation gives the same scores. Most keys are noise; each head
    finds a few that look like its query, in blocks of its own, two of them with equal scores.

    Args:
        shape: of the indexer.
        tokens: of the request, its query token included.
        seed: the same seed gives the same tensors.

    Returns:
        q `[1, heads, head_dim]` bf16, cache `[pages, block_size, head_dim]` bf16, block table `[1, blocks]` int32 and
        sequence lengths `[1]` int32.
    """
    import torch

    rng = torch.Generator().manual_seed(seed)
    blocks = shape.blocks(tokens)
    pages = blocks + blocks // 3
    q = torch.randint(-8, 9, (1, shape.heads, shape.head_dim), generator=rng) / 8
    cache = torch.randint(-3, 4, (pages, shape.block_size, shape.head_dim), generator=rng) / 8
    table = torch.randperm(pages, generator=rng)[:blocks].to(torch.int32)
    for head in range(shape.heads):
        places = torch.randperm(blocks - 1, generator=rng)[: shape.topk + 1]
        for i, block in enumerate(places.tolist()):
            key = q[0, head].clone()
            key[: 6 * max(0, i - 1)] = 0  # weaker and weaker; the first two are equal
            cache[table[block], int(torch.randint(0, shape.block_size, (1,), generator=rng))] = key
    return q.bfloat16(), cache.bfloat16(), table[None], torch.tensor([tokens], dtype=torch.int32)


@plots.styled
def page_table(table: Sequence[int], pages: int) -> Figure:
    """Logical blocks above, physical pages below, a line from each block to its page."""
    count = len(table)
    fig = plots.figure(9.0, 2.1)
    axis = fig.subplots()
    shade = plots.matplotlib.colormaps["viridis"](np.linspace(0.15, 0.95, count))
    wide = pages / count
    for block, page in enumerate(table):
        axis.add_patch(Rectangle((block * wide, 1.0), wide, 0.45, facecolor=shade[block], edgecolor="white"))
        axis.add_patch(Rectangle((page, 0.0), 1.0, 0.45, facecolor=shade[block], edgecolor="white"))
        axis.plot([(block + 0.5) * wide, page + 0.5], [1.0, 0.45], color=shade[block], linewidth=0.9)
        axis.annotate(
            f"{block}",
            ((block + 0.5) * wide, 1.22),
            ha="center",
            va="center",
            fontsize=7,
            color="white" if block < 0.7 * count else "black",
        )
    for page in sorted(set(range(pages)) - set(table)):
        axis.add_patch(Rectangle((page, 0.0), 1.0, 0.45, facecolor="#eeeeee", edgecolor="white", hatch="////"))
    _bare(axis, (0, pages), (-0.35, 1.5))
    axis.annotate(
        "logical blocks of the request, in order",
        (0, 1.52),
        fontsize=8.5,
        fontweight="bold",
        annotation_clip=False,
        va="bottom",
    )
    axis.annotate(
        "pages of the cache, anywhere in memory (hatched: somebody else's)", (0, -0.08), fontsize=8.5, va="top"
    )
    return fig


@plots.styled
def token_scores(dots: np.ndarray, chosen: Sequence[int], shape: IndexerShape, tokens: int, head: int) -> Figure:
    """One head's dots over all tokens, each block's maximum as a step, the chosen blocks shaded.

    Args:
        dots: `[blocks * block_size]`, q . k of the head; entries from `tokens` on are not visible.
        chosen: block ids of the head.
        shape: of the indexer.
        tokens: visible ones.
        head: for the title.
    """
    size, blocks = shape.block_size, shape.blocks(tokens)
    fig = plots.figure(9.0, 3.0)
    axis = fig.subplots()
    for block in range(blocks):
        best = dots[block * size : min(tokens, (block + 1) * size)].max()
        if block in chosen:
            axis.axvspan(block * size, (block + 1) * size, color=plots.CP_COLOUR, alpha=0.18, linewidth=0)
        axis.hlines(
            best, block * size, min(tokens, (block + 1) * size), color=plots.LINE_COLOUR, linewidth=1.8, zorder=3
        )
    axis.plot(np.arange(tokens), dots[:tokens], ".", markersize=1.8, color="#8c8c8c")
    axis.axvspan(tokens, blocks * size, facecolor="#eeeeee", hatch="xxxx", edgecolor="#bbbbbb", linewidth=0)
    axis.set_xlim(0, blocks * size)
    axis.set_xticks([b * size for b in range(0, blocks, 2)], [str(b) for b in range(0, blocks, 2)])
    axis.set_xlabel(f"block ({size} tokens each)")
    axis.set_ylabel("score, unscaled q · k")
    axis.set_title(f"head {head}: a block is worth its best token", loc="left")
    handles = [Line2D([], [], color="#8c8c8c", marker=".", linestyle="none"), Line2D([], [], color=plots.LINE_COLOUR, linewidth=1.8),
               Patch(color=plots.CP_COLOUR, alpha=0.18), Patch(facecolor="#eeeeee", hatch="xxxx", edgecolor="#bbbbbb")]  # fmt: skip
    fig.legend(
        handles,
        ["a token's score", "the block's: their maximum", "chosen", "not visible yet"],
        loc="outside lower center",
        ncols=4,
    )
    return fig


@plots.styled
def selection(scores: np.ndarray, ids: np.ndarray, forced: Sequence[int]) -> Figure:
    """Every head's block scores as a map, the chosen blocks outlined, the forced ones marked.

    Args:
        scores: `[heads, blocks]`.
        ids: `[heads, topk]`, -1 padded.
        forced: block ids that are chosen whatever they score.
    """
    heads, blocks = scores.shape
    fig = plots.figure(9.0, 0.42 * heads + 1.35)
    axis = fig.subplots()
    finite = np.where(np.isfinite(scores), scores, np.nan)
    drawn = axis.imshow(finite, aspect="auto", cmap="Greys", vmin=0, vmax=1.15 * np.nanmax(finite))
    for head in range(heads):
        for block in range(blocks):
            value = finite[head, block]
            if block in ids[head]:
                axis.add_patch(
                    Rectangle(
                        (block - 0.46, head - 0.44), 0.92, 0.88, fill=False, edgecolor=plots.CP_COLOUR, linewidth=2.2
                    )
                )
            dark = value > 0.62 * np.nanmax(finite)
            word = "F" if block in forced else f"{value:.0f}" if np.isfinite(value) else "-"
            axis.annotate(
                word,
                (block, head),
                ha="center",
                va="center",
                fontsize=7,
                color="white" if dark and word != "F" else "black",
            )
    axis.set_xticks(range(blocks))
    axis.set_yticks(range(heads), [f"head {h}" for h in range(heads)])
    axis.grid(False)
    axis.set_xlabel("block")
    axis.set_title("outlined: chosen; F: forced, never scored", loc="left")
    fig.colorbar(drawn, ax=axis, pad=0.01, label="block score")
    return fig


@plots.styled
def key_bits(rows: Sequence[tuple[str, int]]) -> Figure:
    """Candidate keys as rows of bit fields, in the order given.

    Args:
        rows: (words, key) pairs.
    """
    from m3cp.keys import ID_BITS, MAX_BLOCKS

    classes = {3: "3: init", 2: "2: local", 1: "1: scored", 0: "0: nothing"}
    fig = plots.figure(9.0, 0.42 * len(rows) + 0.75)
    axis = fig.subplots()
    fields = ((0, 1.3, "class"), (1.3, 5.2, "order code of the score, 32 bits"), (6.5, 3.5, f"2^{ID_BITS} - 1 - block"))
    for line, (words, key) in enumerate(rows):
        y = len(rows) - 1 - line
        code, low = (key >> ID_BITS) & 0xFFFFFFFF, key & (MAX_BLOCKS - 1)
        texts = (
            classes[key >> (ID_BITS + 32)],
            f"{code:#010x}" if code else "0: a rank, not a number",
            f"{low}  (block {MAX_BLOCKS - 1 - low})",
        )
        for (x, width, _), text, colour in zip(fields, texts, ("#f3b48c", "#9cc9e6", "#bfe3d0"), strict=True):
            axis.add_patch(
                Rectangle((x, y + 0.08), width - 0.06, 0.8, facecolor=colour, edgecolor="#666666", linewidth=0.7)
            )
            axis.annotate(text, (x + width / 2, y + 0.48), ha="center", va="center", fontsize=8, family="monospace")
        axis.annotate(words, (-0.12, y + 0.48), ha="right", va="center", fontsize=8.5, annotation_clip=False)
    for x, width, name in fields:
        axis.annotate(
            name, (x + width / 2, len(rows) + 0.08), ha="center", va="bottom", fontsize=8.5, fontweight="bold"
        )
    _bare(axis, (-3.0, 10.0), (0, len(rows) + 0.45))
    return fig


@plots.styled
def who_reads(world: int, shape: IndexerShape, blocks: int) -> Figure:
    """Which rank scores which (head, block), under TP and under CP, one colour a rank, and each rank's reads."""
    fig = plots.figure(9.0, 0.75 * shape.heads + 1.2)
    axes = fig.subplots(2, 1, sharex=True)
    shards = [Shard(rank, world, shape.heads) for rank in range(world)]
    reads = {
        "TP": f"each rank reads all {blocks} blocks, for its own heads",
        "CP": f"each rank reads {shards[0].local_blocks(blocks)} of {blocks} blocks, once for all heads",
    }
    for axis, path in zip(axes, ("TP", "CP"), strict=True):
        for head in range(shape.heads):
            for block in range(blocks):
                rank = next(s.rank for s in shards if (head in s.owned_heads if path == "TP" else s.owns(block)))
                axis.add_patch(
                    Rectangle(
                        (block, head),
                        1,
                        1,
                        facecolor=RANK_COLOURS[rank],
                        hatch=RANK_HATCHES[rank],
                        edgecolor="white",
                        linewidth=0.6,
                    )
                )
        axis.set_xlim(0, blocks)
        axis.set_ylim(shape.heads, 0)
        axis.set_yticks([h + 0.5 for h in range(shape.heads)], [f"head {h}" for h in range(shape.heads)])
        axis.set_xticks([b + 0.5 for b in range(0, blocks, 2)], [str(b) for b in range(0, blocks, 2)])
        axis.grid(False)
        axis.set_title(f"{path}: {reads[path]}", loc="left")
    axes[1].set_xlabel("block")
    handles = [Patch(facecolor=RANK_COLOURS[r], hatch=RANK_HATCHES[r], edgecolor="white") for r in range(world)]
    fig.legend(handles, [f"scored by rank {r}" for r in range(world)], loc="outside lower center", ncols=world)
    return fig


@plots.styled
def merging(scores: np.ndarray, candidates: Sequence[Sequence[int]], ids: Sequence[int], head: int) -> Figure:
    """One head: every rank's shard with its candidates, and the winners of all of them below.

    Args:
        scores: `[blocks]` of the head.
        candidates: block ids that each rank sends, best first.
        ids: the merged choice, ascending.
        head: for the title.
    """
    world, blocks = len(candidates), len(scores)
    fig = plots.figure(9.0, 0.8 * world + 1.9)
    axes = fig.subplots(world + 1, 1, height_ratios=[1.0] * world + [0.45])
    top = 1.2 * np.nanmax(np.where(np.isfinite(scores), scores, np.nan))
    for rank, axis in enumerate(axes[:-1]):
        for block in range(rank, blocks, world):
            sent, value = block in candidates[rank], scores[block]
            axis.bar(block, value if np.isfinite(value) else top / 1.2, width=0.8, color=RANK_COLOURS[rank] if sent else "#e3e3e3",
                     hatch="" if np.isfinite(value) else "////", edgecolor="white")  # fmt: skip
            if sent:
                place = list(candidates[rank]).index(block) + 1
                axis.annotate(
                    f"{place}",
                    (block, value if np.isfinite(value) else top / 1.2),
                    (0, 1),
                    textcoords="offset points",
                    ha="center",
                    fontsize=7,
                )
        axis.set_xlim(-0.6, blocks - 0.4)
        axis.set_ylim(0, top)
        axis.set_xticks([])
        axis.set_yticks([])
        axis.set_ylabel(f"rank {rank}", rotation=0, ha="right", va="center")
        axis.grid(False)
        axis.patch.set_visible(False)  # the lines to the winners run behind
    last = axes[-1]
    for block in range(blocks):
        won = block in ids
        last.add_patch(
            Rectangle(
                (block - 0.4, 0),
                0.8,
                1,
                facecolor=RANK_COLOURS[block % world] if won else "#f4f4f4",
                edgecolor=CHOSEN if won else "white",
                linewidth=1.6 if won else 0.6,
            )
        )
        if won:
            line = ConnectionPatch(
                (block, 0),
                (block, 1),
                "data",
                "data",
                axesA=axes[block % world],
                axesB=last,
                color=RANK_COLOURS[block % world],
                linewidth=1.2,
                zorder=0,
            )
            line.set_in_layout(False)  # it crosses all axes between: room for it would push them apart
            fig.add_artist(line)
    last.set_xlim(-0.6, blocks - 0.4)
    last.set_ylim(0, 1.1)
    last.set_xticks(range(blocks))
    last.set_yticks([])
    last.grid(False)
    last.set_ylabel("chosen", rotation=0, ha="right", va="center")
    last.set_xlabel("block")
    fig.suptitle(
        f"head {head}: each rank sends its best (numbered), the owner keeps the best of all; hatched: forced",
        x=0.01,
        ha="left",
        fontsize=10,
    )
    return fig


@dataclass(frozen=True)
class Hand:
    """A cost model as drawn by hand for one batch: a fixed cost an arm, and bytes over one bandwidth.

    Args:
        batch: requests.
        gbs: best page-read bandwidth of the run.
        tp_fixed_us, cp_fixed_us: what the shortest measured context that reads keys costs beyond its bytes.
        break_even_tokens: context a request at which the two lines cross; infinity where they never do.
    """

    batch: int
    gbs: float
    tp_fixed_us: float
    cp_fixed_us: float
    break_even_tokens: float

    def us(self, model: fit.CostModel, context_tokens: int) -> float:
        """Microseconds by hand for the arm of a model: fixed cost plus its bytes over the bandwidth."""
        from m3cp.traffic import distinct_bytes_read

        fixed = self.cp_fixed_us if model.arm.endswith("cp") else self.tp_fixed_us
        return fixed + distinct_bytes_read(model.point(context_tokens, self.batch)) / self.gbs / 1e3


def by_hand(comparison: crossover.Comparison, batch: int) -> Hand:
    """Two numbers an arm, from one row each and one bandwidth.

    Args:
        comparison: with page reads in its rows' run, so that they have a limit.
        batch: one that was measured.

    Raises:
        ValueError: no row of both arms at that batch reads keys and has a limit.
    """
    fixed, rate = [], 0.0
    for rows in crossover.arm_frames(comparison):
        mine = (
            rows[(rows["batch"] == batch) & (rows["bytes_read"] > 0)]
            .dropna(subset=["limit_us"])
            .sort_values("context_tokens")
        )
        if mine.empty:
            raise ValueError(
                f"batch={batch}: no row of both arms reads keys and has a limit; measured are {sorted(set(comparison.frame['batch']))}"
            )
        first = mine.iloc[0]
        fixed.append(float(first["median_us"] - first["limit_us"]))
        rate = float(first["distinct_bytes_read"] / first["limit_us"] / 1e3)
    point = comparison.pairs.iloc[0]
    per_token = point["shape"].key_bytes(point["dtype"]) / point["shape"].block_size
    saved = batch * per_token * (1 - 1 / int(point["world"]))  # bytes a rank no longer reads, for each token of context
    price = fixed[1] - fixed[0]
    return Hand(batch, rate, *fixed, price * rate * 1e3 / saved if price > 0 else 0.0)


@plots.styled
def hand_and_fit(comparison: crossover.Comparison, hand: Hand) -> Figure:
    """The model drawn by hand (wobbly), the fitted one (dashed) and what was measured (marks), near break-even and over all.

    Args:
        comparison: with both fits.
        hand: of `by_hand`.
    """
    pairs = comparison.pairs[(comparison.pairs["batch"] == hand.batch) & comparison.pairs["read"]].sort_values(
        "context_tokens"
    )
    contexts = list(pairs["context_tokens"])
    shape, world = comparison.cp.template.shape, comparison.cp.template.world
    grid = crossover.context_grid(contexts[0], contexts[-1], shape.block_size * world, 60)
    fig = plots.figure(9.6, 3.9)
    axes = fig.subplots(1, 2)
    near = 4 * max([a.value for a in comparison.measured if a.at == hand.batch and a.value] or [contexts[-1] / 4])
    handles: dict[str, Any] = {}
    for axis in axes:
        for model, column, colour, marker, name in (
            (comparison.tp, "tp_us", plots.TP_COLOUR, "o", "TP"),
            (comparison.cp, "cp_us", plots.CP_COLOUR, "s", "CP"),
        ):
            axis.plot(contexts, pairs[column], marker, color=colour, zorder=4)
            axis.plot(
                grid,
                [model.us(model.point(c, hand.batch)) for c in grid],
                color=colour,
                linestyle=(0, (5, 2)),
                linewidth=1.0,
                zorder=3,
            )
            (line,) = axis.plot(grid, [hand.us(model, c) for c in grid], color=colour, linewidth=2.2, alpha=0.55)
            line.set_sketch_params(scale=1.2, length=60, randomness=6)
            handles[f"{name}, measured"] = Line2D([], [], color=colour, marker=marker, linestyle="none")
            handles[f"{name}, fitted"] = Line2D([], [], color=colour, linestyle=(0, (5, 2)), linewidth=1.0)
            handles[f"{name}, by hand: fixed + bytes / bandwidth"] = Line2D(
                [], [], color=colour, linewidth=2.2, alpha=0.55
            )
        axis.set_ylabel("µs a layer")
    close = [c for c in contexts if c <= near] or contexts
    top = max(
        pairs["tp_us"][pairs["context_tokens"] <= close[-1]].max(),
        pairs["cp_us"][pairs["context_tokens"] <= close[-1]].max(),
    )
    plots.context_axis(axes[1], contexts)
    axes[1].set_yscale("log")
    decades = [10.0**e for e in range(-1, 6) if pairs["cp_us"].min() / 3 <= 10.0**e <= 3 * pairs["tp_us"].max()]
    axes[1].set_yticks(decades, [f"{t:g}" for t in decades])
    axes[1].set_title("over everything measured", loc="left")
    axes[0].set_xlim(0, 1.05 * close[-1])
    axes[0].set_ylim(0, 1.15 * top)
    ticks = [c for c in contexts if c <= near][-5:]
    axes[0].set_xticks(ticks, [plots.tokens_text(int(t)) for t in ticks])
    axes[0].set_xlabel("context, tokens a request")
    axes[0].set_title(f"near break-even, batch {hand.batch}", loc="left")
    fig.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2)
    return fig


def three_answers(comparison: crossover.Comparison, hand: Hand) -> str:
    """Break-even at the hand's batch three ways: by hand, fitted with its band, and measured."""
    lines = [
        f"by hand   about {crossover.tokens_about(hand.break_even_tokens)} tokens a request: {hand.cp_fixed_us - hand.tp_fixed_us:+.2f} µs bought back at {hand.gbs:.0f} GB/s"
    ]
    for word, answers in (("fitted", comparison.model), ("measured", comparison.measured)):
        lines += [f"{word:<9} {a.text}" for a in answers if a.at == hand.batch]
    return "\n".join(lines)


def recorded(run: str) -> crossover.Comparison:
    """The headline comparison of a run, "" for the first recorded node, with the cost model of all terms.

    Raises:
        ValueError: a run without both fits.
    """
    folder = run or str(sorted((frames.ROOT / "data" / "measured").glob(f"*/{frames.records.ROWS_FILE}"))[0].parent)
    found = crossover.headline(
        [c for c in crossover.comparisons(frames.load_run(folder).frame, fit.ALL_TERMS) if c.tp and c.cp]
    )
    if found is None:
        raise ValueError(f"run={run!r}: no CP rows beside TP rows over three sizes that read keys")
    return found


def _bare(axis: Any, x: tuple[float, float], y: tuple[float, float]) -> None:
    """An axis without ticks, spines and grid, for diagrams."""
    axis.set_xlim(*x)
    axis.set_ylim(*y)
    axis.set_axis_off()
