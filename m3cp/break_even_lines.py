"""The measured break-even lines of a run: our fastest form and every engine's CP, charged with the extra projection, and their table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from m3cp.crossover import VARIANT, BreakEven, break_even_measured, pairs, tokens_about
from m3cp.frames import overlap_words, split
from m3cp.projection import Projection, charged, charges
from m3cp.shapes import require


@dataclass(frozen=True)
class MeasuredLine:
    """One measured break-even line over batch and context.

    Args:
        name: of the variant, and what was charged, in words.
        pairs: its pairs, with the charge in `delta_us`; all of one grid bound, none behind an evicting read.
        charge_us: microseconds a call that were added to CP; the largest, where batches differ.
        answers: break-even over context, one a batch.
        note: where the charge is from, a sentence; "" where nothing could be charged.
    """

    name: str
    pairs: Any
    charge_us: float
    answers: tuple[BreakEven, ...]
    note: str = ""

    @property
    def variant(self) -> dict[str, Any]:
        """The fields of `VARIANT`."""
        return {name: self.pairs[name].iloc[0] for name in VARIANT}

    @property
    def first(self) -> Any:
        """A pair that tells node, P and caches: one that reads keys, since a row that reads none is warm whatever was asked for."""
        read = self.pairs[self.pairs["read"]]
        return (read if len(read) else self.pairs).iloc[0]

    def measured(self, batch: float) -> tuple[int, int]:
        """The shortest and the longest context measured at a batch, tokens."""
        mine = self.pairs[self.pairs["batch"] == batch]["context_tokens"]
        return int(mine.min()), int(mine.max())

    def cell(self, answer: BreakEven) -> str:
        """An answer of this line as a table's cell: "33.5k (31.9k to 41.2k)", "below range (from 8k)"."""
        first, last = (tokens_about(c) for c in self.measured(answer.at))
        if answer.answer != "crosses" or answer.value is None:
            return {"none in range": f"none in range (up to {last})", "below range": f"below range (from {first})"}.get(answer.answer, answer.answer)
        low = tokens_about(answer.low) if answer.low > 0 else f"below {first}"
        high = tokens_about(answer.high) if math.isfinite(answer.high) else f"beyond {last}"
        about = tokens_about(answer.value)
        return about if low == high == about else f"{about} ({low} to {high})"


def measured_lines(frame, draws: int = 400, projections: Sequence[Projection] = ()) -> list[MeasuredLine]:
    """The measured break-even lines of a run: our fastest form, gathered and replicated, and every engine's CP.

    Of uniform batches at the world, dtype and query length that most pairs have, not behind an evicting read; of several
    grid bounds the one with most contexts. Replicated queries are charged with the extra projection where their rows do not hold it: as measured
    on their machine, else as others measured it; and once more as if its weights were read at the page-read rate.

    Args:
        frame: of `frames.table`.
        draws: of the bootstrap.
        projections: of `layer_shares.extra_projections`; those of another machine charge nothing.

    Returns:
        One line a variant and charge, ours first; empty where no CP row met its baseline.
    """
    paired = pairs(frame, draws=draws)
    paired = paired[(paired["mix"] == "uniform") & (paired["rows_padded"] == 0) & ~paired["evicted"].astype(bool)]
    same = ("world", "dtype", "query_len", "shape", "cache", "launch", "node", "code_hash", "source", "boundary")
    sets = split(paired, same)
    if not sets:
        return []
    paired = max(sets.values(), key=len)
    forms = [form for form in ("one_launch", "two_launch", "staged") if form in set(paired["form"])]
    found = []
    for values, part in split(paired, VARIANT).items():
        variant = dict(zip(VARIANT, values, strict=True))
        if variant["threshold_blocks"] is not None or (variant["arm"] == "cp" and variant["form"] != forms[0]):
            continue
        part = max(split(part, ("max_context",)).values(), key=lambda p: (p["context_tokens"].nunique(), len(p)))
        for us, drawn, words, note in charges(frame, part, projections, draws):
            mine = charged(part, us, drawn)
            name = ", ".join(w for w in (variant_name(variant), words) if w)
            found.append(MeasuredLine(name, mine, float(np.max(us)), tuple(break_even_measured(mine)), note))
    order = {"cp": 0, "vllm_cp": 1, "sglang_cp": 2}
    return sorted(found, key=lambda f: (order[f.variant["arm"]], f.variant["queries"] != "gathered", f.charge_us, f.variant["exchange"] != "symmetric"))


def variant_name(variant: dict[str, Any]) -> str:
    """A CP variant in words: "CP one launch, gathered", "vLLM CP over NCCL, gathered"."""
    engine = {"cp": "CP", "vllm_cp": "vLLM CP", "sglang_cp": "SGLang CP"}[variant["arm"]]
    how = str(variant["form"]).replace("_", " ") if variant["arm"] == "cp" else ""
    over = {"collective": "over collectives", "symmetric": "over our gather" if variant["arm"] != "cp" else ""}.get(variant["exchange"], "")
    return f"{' '.join(w for w in (engine, how, over) if w)}, {variant['queries']}"


def line_table(lines: Sequence[MeasuredLine]) -> tuple[list[str], list[list[str]], str]:
    """Measured break-even over context as a table, a column a line, a row a batch: head, rows, and what it shows.

    Raises:
        ValueError: no line.
    """
    require("lines", lines, len(lines) > 0, "at least one: a CP row that meets a TP row")
    first = lines[0].first
    rows = [
        [f"{batch:.0f}", *(next((line.cell(a) for a in line.answers if a.at == batch), "not measured") for line in lines)]
        for batch in sorted({answer.at for line in lines for answer in line.answers})
    ]
    bounds = {line.name.split(", projection")[0]: tokens_about(line.pairs["max_context"].iloc[0]) for line in lines}
    note = (
        f"Tokens a request from which CP is not slower than TP of the same kernels: {first['source']}, {first['node']}, P = {first['world']}, "
        f"{first['dtype']}, {first['cache_state']} caches; interpolated between measured contexts, 95% in brackets. Up to "
        f"{first['shape'].topk * first['shape'].block_size} tokens no key is read. Grids bound at "
        f"{'; '.join(f'{bound} ({name})' for name, bound in bounds.items())}."
    )  # fmt: skip
    note = " ".join((note, *dict.fromkeys(line.note for line in lines if line.note)))
    narrow = overlap_words(lines[0].pairs)
    return ["batch", *(line.name for line in lines)], rows, note + (f" {narrow[0].upper()}{narrow[1:]}." if narrow else "")
