"""A fitted model as a small file that an engine loads: which path is faster for this decode batch, and by how much.

Loading and deciding is plain Python (no numpy, pandas, torch), fast enough for every step, and depends on its arguments
alone, so that all ranks decide alike. A policy advises; nothing here turns context parallelism on.

A policy is for one arm ("cp", "vllm_cp" or "sglang_cp"), one exchange and one way to share queries, on one node, from
rows of one code version. Outside the range that was measured it refuses in words.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter, mul
from pathlib import Path
from typing import Any, NamedTuple

from m3cp.shapes import IndexerShape, require
from m3cp.terms import TERMS, Kernels, Load

FORMAT, VERSION = "m3cp-policy", 2
ARMS = ("cp", "vllm_cp", "sglang_cp")


class Decision(NamedTuple):
    """What to run for a batch.

    Args:
        path: "cp" or "tp"; "tp", the engines' default, also where the policy refuses.
        gain_us: TP - CP in microseconds a layer: positive where CP is faster; 0.0 where refused.
        confidence: probability that the path is the faster one, 0.5 to 1; 0.0 where refused.
        reason: in words; starts with "refused:" outside the policy's range.
    """

    path: str
    gain_us: float
    confidence: float
    reason: str

    @property
    def refused(self) -> bool:
        """Whether the batch lies outside what the policy was fitted to."""
        return self.reason.startswith("refused:")


@dataclass(frozen=True)
class Arm:
    """One arm's cost, ready to be evaluated: microseconds = values . amounts, with the estimates' uncertainty.

    Args:
        terms: names of `terms.TERMS`.
        values: one for each term.
        root: upper triangular rows; the variance is the sum of the squares of (row . amounts), each row's leading zeros
            left out.
        spread: relative standard deviation of rows around the fit.
        kernels: what shapes the amounts.
        shards: parts that the blocks are dealt to: 1 for TP, the world size for CP.
        heads: heads that a rank scores.
        row_kib: KiB that a query row sends to all peers together.
    """

    terms: tuple[str, ...]
    values: tuple[float, ...]
    root: tuple[tuple[float, ...], ...]
    spread: float
    kernels: Kernels
    shards: int
    heads: int
    row_kib: float

    def __post_init__(self) -> None:
        require("terms", self.terms, set(self.terms) <= set(TERMS), f"of {', '.join(TERMS)}")
        ok = len(self.values) == len(self.terms) and [len(r) for r in self.root] == list(range(len(self.terms), 0, -1))
        require("values", self.values, ok, "one value and one row of root for each term")
        numbers = (*self.values, self.spread, *(v for row in self.root for v in row))
        require("values", self.values, all(math.isfinite(v) for v in numbers), "finite, as must be root and spread")

    def amounts(self, query_len: int, block_mb: float) -> Callable[[Read], list[float]]:
        """A function of what a batch reads that gives what the terms multiply; blocks are dealt evenly here."""
        part, part_mb, row_kib, heads, how = 1.0 / self.shards, block_mb / self.shards, self.row_kib, self.heads, self.kernels
        exchanges = float(row_kib > 0)
        peers = max(0, self.shards - 2) if exchanges else 0
        each, make = [TERMS[name].amount for name in self.terms], Load._make

        def amounts(read: Read) -> list[float]:
            total, longest, visible, requests = read
            rows = requests * query_len
            load = make((
                total * part, total * part_mb, longest * part, visible * part, visible, (requests * longest - total) * part,
                rows, heads, exchanges, peers, rows * row_kib,
            ))  # fmt: skip
            return [amount(load, how) for amount in each]

        return amounts


class Read(NamedTuple):
    """What a batch reads: blocks of all requests and of the longest, all that the longest has, and requests."""

    total: int
    longest: int
    visible: int
    requests: int


@dataclass(frozen=True)
class Entry:
    """The two arms for one world size, cache dtype and query length, and the range they were fitted to.

    Args:
        context_tokens, batch: (lowest, highest) fitted; the first is that of the longest request.
        uneven: largest share of blocks that shorter requests lack to the longest, of the fitted rows.
    """

    world: int
    dtype: str
    query_len: int
    context_tokens: tuple[int, int]
    batch: tuple[int, int]
    uneven: float
    tp: Arm
    cp: Arm


@dataclass(frozen=True)
class Policy:
    """A policy as it is loaded from a file (`load`) or made from rows (`advice.from_comparisons`).

    Args:
        arm: "cp", "vllm_cp" or "sglang_cp".
        form, exchange, queries: of that arm, None where it has none.
        shape: of the indexer.
        entries: one for each world, dtype and query length.
        provenance: node, code hash, commit, run, cache state, mixes.
    """

    arm: str
    form: str | None
    exchange: str | None
    queries: str | None
    shape: IndexerShape
    entries: tuple[Entry, ...]
    provenance: Mapping[str, Any] = field(default_factory=dict)
    _deciders: dict[tuple[int, str, int], Callable[[Sequence[int]], Decision]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        require("arm", self.arm, self.arm in ARMS, f"one of {', '.join(ARMS)}")
        require("entries", self.entries, len(self.entries) > 0, "at least one")
        for entry in self.entries:
            self._deciders[entry.world, entry.dtype, entry.query_len] = _decider(entry, self.shape)

    def decide(self, context_lengths: Sequence[int], world: int, dtype: str, query_len: int = 1) -> Decision:
        """Which path is faster for a decode batch.

        Args:
            context_lengths: total tokens of each request, this step's queries included; 0 for a padding row.
            world: ranks.
            dtype: of the index-K cache; "auto" means bf16, as in the engines.
            query_len: query tokens a request.

        Returns:
            A Decision; one whose reason starts with "refused:" where the batch is outside the policy's range.
        """
        decider = self._deciders.get((world, "bf16" if dtype == "auto" else dtype, query_len))
        if decider is None:
            known = "; ".join(f"world={e.world} dtype={e.dtype} query_len={e.query_len}" for e in self.entries)
            return Decision(
                "tp",
                0.0,
                0.0,
                f"refused: world={world} dtype={dtype} query_len={query_len} was not measured; the policy has {known}",
            )
        return decider(context_lengths)

    def entry(self, world: int, dtype: str, query_len: int = 1) -> Entry:
        """The entry for a world, dtype and query length.

        Raises:
            ValueError: naming what there is.
        """
        for found in self.entries:
            if (found.world, found.dtype, found.query_len) == (world, dtype, query_len):
                return found
        known = "; ".join(f"world={e.world} dtype={e.dtype} query_len={e.query_len}" for e in self.entries)
        raise ValueError(f"world={world} dtype={dtype!r} query_len={query_len}: the policy has {known}")

    def costs_us(
        self, context_lengths: Sequence[int], world: int, dtype: str, query_len: int = 1
    ) -> tuple[float, float]:
        """Modelled (TP, CP) microseconds of a batch, whatever the range; (0, 0) for an empty one."""
        entry = self.entry(world, dtype, query_len)
        read = reads(context_lengths, self.shape)
        block_mb = self.shape.key_bytes(dtype) / 1e6
        return tuple(_dot(a.values, a.amounts(query_len, block_mb)(read)) for a in (entry.tp, entry.cp))

    def threshold_blocks(
        self, world: int, dtype: str, query_len: int = 1, batches: Iterable[Sequence[int]] = ()
    ) -> int:
        """The one number for a switch on the device: take CP when the batch's visible blocks exceed it.

        Blocks are summed over all requests, short ones included. The threshold is the one that loses least over
        `batches`, every batch counted once; without any, over uniform batches of the policy's range.

        Returns:
            A number of blocks; one below the smallest sum where CP should always be taken, the largest sum where never.
        """
        entry = self.entry(world, dtype, query_len)
        known = list(batches) or [[c] * b for c in _doubling(*entry.context_tokens) for b in _doubling(*entry.batch)]
        gains: dict[int, float] = {}
        for lengths in known:
            tp, cp = self.costs_us(lengths, world, dtype, query_len)
            total = sum(self.shape.blocks(n) for n in lengths)
            gains[total] = gains.get(total, 0.0) + tp - cp
        sums = sorted(gains)
        best, value, kept = sums[0] - 1, sum(gains.values()), sum(gains.values())
        for total in sums:  # a threshold at `total` gives up the gains of all batches up to it
            kept -= gains[total]
            if kept > value + 1e-12:
                best, value = total, kept
        return max(0, best)

    def to_json(self) -> str:
        """The file's text: the same policy gives the same bytes."""
        return json.dumps(_plain(self), indent=1, allow_nan=False) + "\n"

    def save(self, path: Path | str) -> Path:
        """Write the policy file, creating its folder."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json())
        return path


def load(path: Path | str) -> Policy:
    """Read a policy file.

    Raises:
        ValueError: not a policy, another version, or fields that this version does not know; the message names them.
    """
    try:
        values = json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ValueError(
            f"{path}: format={values.get('format') if isinstance(values, dict) else None!r}, must be {FORMAT!r}"
        )
    if values.get("version") != VERSION:
        raise ValueError(f"{path}: version={values.get('version')!r}, this code reads version {VERSION}")
    try:
        entries = tuple(
            Entry(
                **{
                    **e,
                    "context_tokens": tuple(e["context_tokens"]),
                    "batch": tuple(e["batch"]),
                    "tp": _arm(e["tp"]),
                    "cp": _arm(e["cp"]),
                }
            )
            for e in values["entries"]
        )
        named = {k: values[k] for k in ("arm", "form", "exchange", "queries", "provenance")}
        unknown = set(values) - {"format", "version", "shape", "entries", *named}
        if unknown:
            raise ValueError(f"fields {sorted(unknown)}")
        return Policy(shape=IndexerShape(**values["shape"]), entries=entries, **named)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a policy of version {VERSION}: {error}") from error


def _arm(values: Mapping[str, Any]) -> Arm:
    lists = {name: tuple(values[name]) for name in ("terms", "values")}
    return Arm(**{**values, **lists, "root": tuple(map(tuple, values["root"])), "kernels": Kernels(**values["kernels"])})


def _plain(policy: Policy) -> dict[str, Any]:
    entries = [dataclasses.asdict(entry) for entry in policy.entries]
    for entry, values in zip(policy.entries, entries, strict=True):
        for arm in ("tp", "cp"):
            values[arm]["kernels"] = getattr(entry, arm).kernels._asdict()
    named = {name: getattr(policy, name) for name in ("arm", "form", "exchange", "queries")}
    return {
        "format": FORMAT, "version": VERSION, **named, "shape": dataclasses.asdict(policy.shape),
        "entries": entries, "provenance": dict(policy.provenance),
    }  # fmt: skip


def _doubling(low: int, high: int) -> list[int]:
    steps = max(1, round(4 * math.log2(high / low)))
    return sorted({round(low * (high / low) ** (i / steps)) for i in range(steps + 1)})


def reads(context_lengths: Sequence[int], shape: IndexerShape) -> Read:
    """What a batch reads; padding rows are no requests, and requests of at most topk blocks read nothing."""
    forced = shape.init_blocks + shape.local_blocks
    blocks = [shape.blocks(n) for n in context_lengths if n > 0]
    read = [max(0, b - forced) for b in blocks if b > shape.topk]
    return Read(sum(read), max(read, default=0), max(blocks, default=0), len(blocks))


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(map(mul, a, b))


def _evaluator(arm: Arm, query_len: int, block_mb: float) -> Callable[[Read], tuple[float, float]]:
    """A function of what a batch reads that gives (microseconds, variance)."""
    amounts, values, of_size, n = arm.amounts(query_len, block_mb), tuple(arm.values), arm.spread**2, len(arm.values)
    pairs = [(i, j) for i in range(n) for j in range(i, n)]
    # The variance as one sum over pairs of amounts: a third of the time that row by row takes.
    weights = [sum(row[i - k] * row[j - k] for k, row in enumerate(arm.root[: i + 1])) * (1 + (i < j)) for i, j in pairs]
    first, second = (itemgetter(*(pair[side] for pair in pairs), 0) for side in (0, 1))  # one more, so that one pair is a tuple

    def evaluate(read: Read) -> tuple[float, float]:
        x = amounts(read)
        us = sum(map(mul, values, x))
        return us, of_size * us * us + max(0.0, sum(map(mul, weights, map(mul, first(x), second(x)))))

    return evaluate


def _decider(entry: Entry, shape: IndexerShape) -> Callable[[Sequence[int]], Decision]:
    """A function of the context lengths alone, with everything else bound: what keeps a decision in microseconds."""
    size, last, topk, forced = shape.block_size, shape.block_size - 1, shape.topk, shape.init_blocks + shape.local_blocks
    (low, high), (few, many) = entry.context_tokens, entry.batch
    uneven, root2, erf, sqrt = entry.uneven + 0.02, math.sqrt(2.0), math.erf, math.sqrt
    shortest, tallest = shape.blocks(low), shape.blocks(high)
    block_mb = shape.key_bytes(entry.dtype) / 1e6
    tp, cp = (_evaluator(arm, entry.query_len, block_mb) for arm in (entry.tp, entry.cp))

    def decide(context_lengths: Sequence[int]) -> Decision:
        blocks = [(n + last) // size for n in context_lengths if n > 0]
        count, visible = len(blocks), max(blocks, default=0)
        if not count:
            return Decision("tp", 0.0, 1.0, "no request: nothing to do")
        if min(blocks) <= topk:
            blocks = [b for b in blocks if b > topk]
        longest = visible - forced if blocks else 0
        if longest <= 0:
            return Decision(
                "tp", 0.0, 1.0, f"no request reads a key (more than {topk} blocks, {forced} forced): nothing to gain"
            )
        if not few <= count <= many:
            return Decision("tp", 0.0, 0.0, f"refused: batch={count} outside {few} to {many}")
        if not shortest <= visible <= tallest:
            top = max(context_lengths)
            return Decision("tp", 0.0, 0.0, f"refused: longest context of {top} tokens outside {low} to {high}")
        total = sum(blocks) - len(blocks) * forced if forced <= topk else sum(max(0, b - forced) for b in blocks)
        whole = count * longest
        if whole - total > uneven * whole:
            share = 1 - total / whole
            return Decision(
                "tp",
                0.0,
                0.0,
                f"refused: lengths more uneven ({share:.0%} of blocks missing to the longest) than fitted ({entry.uneven:.0%})",
            )
        read = Read(total, longest, visible, count)
        (tp_us, tp_variance), (cp_us, cp_variance) = tp(read), cp(read)
        gain, variance = tp_us - cp_us, tp_variance + cp_variance
        sure = 0.5 + 0.5 * erf(abs(gain) / (root2 * sqrt(variance))) if variance > 0 else 1.0
        if gain > 0:
            return Decision("cp", gain, sure, f"CP saves {gain:.1f} us a layer: TP {tp_us:.1f}, CP {cp_us:.1f}")
        return Decision("tp", gain, sure, f"TP saves {-gain:.1f} us a layer: TP {tp_us:.1f}, CP {cp_us:.1f}")

    return decide
