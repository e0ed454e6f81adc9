"""What projecting the other ranks' index heads costs CP with replicated queries, and pairs charged with it.

Rows of the indexer alone do not hold that cost: the fused product before attention does. It is taken as measured on the pairs' own machine,
else as others published it; beside either stands what the bytes of the weights alone would take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from m3cp.crossover import difference_draws
from m3cp.frames import CHARGED, missing, timed
from m3cp.traffic import HIDDEN

# What projecting the other ranks' heads too costs a layer, microseconds by world: measured by others on an H200 in the
# fused qkv and index projection (bf16, rotating weights, batches 1 to 32). Published, so assumed here.
PUBLISHED_US = {2: (0.0, "nothing above noise"), 4: (2.2, "1.9 to 2.5 µs")}


def published_us(world: int) -> tuple[float | None, str]:
    """Microseconds a layer to charge replicated queries for projecting the other ranks' heads, and where that is from.

    None, with the reason, where nobody measured it.
    """
    if world not in PUBLISHED_US:
        return None, f"Replicated queries do not pay for projecting the other ranks' heads: at P = {world} nobody measured it."
    us, words = PUBLISHED_US[world]
    return us, f"Replicated queries are charged {us:g} µs for projecting the other ranks' heads: {words} at P = {world} (published, an H200; assumed here)."


def bytes_us(shape: Any, world: int, bytes_a_us: float) -> float:
    """The same cost if the weights of those heads were read at `bytes_a_us`; computed, and no bound.

    In the fused projection they ride along with far larger weights.
    """
    owned = max(1, shape.heads // world)
    return (shape.heads - owned) * HIDDEN * shape.head_dim * 2 / bytes_a_us


@dataclass(frozen=True)
class Projection:
    """What projecting the other ranks' index heads costs, measured: the fused product before attention with and without them.

    Args:
        node, code_hash: of the rows.
        kind: what they share with the pairs that they charge: world, shape, cache, launch.
        rounds: {query rows: [(microseconds of each round without, with those heads), one a process]}; rows are batch x query_len.
    """

    node: str
    code_hash: str
    kind: tuple
    rounds: dict[int, list[tuple[Sequence[float], Sequence[float]]]]

    def at(self, rows: Sequence[float], draws: int = 400) -> tuple[np.ndarray, np.ndarray]:
        """Microseconds at numbers of query rows, `[rows]`, and bootstrap draws of them, `[rows, draws]`.

        Linear between measured ones; beyond them the nearest one's.
        """
        rng, known = np.random.default_rng(1), sorted(self.rounds)  # 0 draws the pairs' rounds', which these are independent of
        best = [np.median([np.median(more) - np.median(less) for less, more in self.rounds[b]]) for b in known]
        drawn = [np.median([difference_draws(more, less, draws, rng) for less, more in self.rounds[b]], axis=0) for b in known]
        curves = [np.interp(rows, known, curve) for curve in np.transpose(drawn)]
        return np.interp(rows, known, best), np.transpose(curves)

    def name(self, rows: Sequence[float], code_hash: str) -> str:
        """What was charged at numbers of query rows, for a line's name; names the code where it is not that of the line's rows."""
        us, at = sorted({f"{v:.2f}" for v in np.maximum(self.at(rows)[0], 0.0)}, key=float), sorted(set(rows))
        where = f"{' to '.join(f'{n:g}' for n in dict.fromkeys((at[0], at[-1])))} query row{'s' if at[-1] > 1 else ''}"
        other = "" if code_hash == self.code_hash else f", by code {self.code_hash}"
        return f"projection measured, {' to '.join(dict.fromkeys((us[0], us[-1])))} µs at {where}{other}"

    def note(self, code_hash: str) -> str:
        """The charge at each measured number of query rows with its 95% interval, as a sentence."""
        us, drawn = self.at(sorted(self.rounds), 2000)
        bands = [np.percentile(d, [2.5, 97.5]) for d in drawn]
        each = "; ".join(f"{b} query row{'s' if b > 1 else ''}: {v:.2f} µs ({low:.2f} to {high:.2f})" for b, v, (low, high) in zip(sorted(self.rounds), us, bands, strict=True))
        other = "" if code_hash == self.code_hash else f" Their rows are of code {self.code_hash}, those of the paths of {code_hash}."
        less = " Where more columns make the product faster nothing is charged: TP could run it too." if min(us) < 0 else ""
        return (
            f"Replicated queries are charged for projecting the other ranks' heads what that adds to the fused product before attention, measured on {self.node} "
            f"at P = {self.kind[0]}: {each}; linear in between, beyond them as at the nearest.{less}{other}"
        )


def find(projections: Sequence[Projection], row: Any) -> tuple[Projection | None, str]:
    """The measured projection that may charge a row or pair: its machine's, preferably of its code; else None and why.

    Args:
        row: with world, shape, cache, launch, node and code_hash.
    """
    kind = tuple(row[name] for name in ("world", "shape", "cache", "launch"))
    alike = [p for p in projections if p.kind == kind]
    fits = [p for p in alike if p.node == row["node"]]
    nodes = ", ".join(sorted({p.node for p in alike}))
    why = f" Measured on {nodes}, another machine: not used." if alike else ""
    return (max(fits, key=lambda p: (p.code_hash == row["code_hash"], len(p.rounds))), "") if fits else (None, why)


def charged(pairs: Any, us: Any, drawn: Any = None) -> Any:
    """Pairs whose CP takes `us` more a call: one figure, or one a pair with draws of each, `[pairs, draws]`."""
    moved = pairs["draws"] + us if drawn is None else [a + b for a, b in zip(pairs["draws"], drawn, strict=True)]
    changed = pairs.assign(cp_us=pairs["cp_us"] + us, delta_us=pairs["delta_us"] + us, draws=moved)
    bands = [np.percentile(draws, [2.5, 97.5]) for draws in changed["draws"]]
    return changed.assign(delta_low=[low for low, _ in bands], delta_high=[high for _, high in bands])


def charges(frame, part, projections: Sequence[Projection], draws: int) -> list[tuple[Any, Any, str, str]]:
    """What pairs of one variant are charged, each with (microseconds, draws of them, words for the name, a sentence)."""
    first, rows = part.iloc[0], timed(frame)
    if first["queries"] != "replicated":
        return [(0.0, None, "", "")]
    alike = ("arm", "form", "exchange", "queries", "world", "node", "code_hash", "launch", "boundary")
    own = np.logical_and.reduce([rows[n] == first[n] for n in alike if not missing(first[n])])
    regions = rows[own]["region"]
    if any(stage in CHARGED for region in regions for stage in region):
        return [(0.0, None, "projection in the timed region", "Rows of replicated queries hold the projection of the other ranks' heads.")]
    ours, unused = find(projections, first)
    if ours is not None:
        tokens, code = part["batch"] * part["query_len"], first["code_hash"]
        us, drawn = (np.maximum(v, 0.0) for v in ours.at(tokens, draws))  # a product that gains by more columns is TP's to run too
        note, unused = ours.note(code), ""
        found = [(us, drawn, ours.name(tokens, code), note)]
    else:
        us, note = published_us(int(first["world"]))
        found = [(us or 0.0, None, "projection not charged" if us is None else f"projection {us:g} µs (published)", note + unused)]
    cold = rows["cache_state"] == "cold"  # weights come from memory; a warm read would make them cheaper than they are
    floors = rows[(rows["arm"] == "page_read") & (rows["distinct_bytes_read"] > 0) & (rows["node"] == first["node"]) & cold]
    if len(floors):
        best = float((floors["distinct_bytes_read"] / floors["median_us"]).max())
        by_bytes = bytes_us(first["shape"], int(first["world"]), best)
        found.append((by_bytes, None, f"projection {by_bytes:.2f} µs (its bytes, computed)", note + unused))
    return found
