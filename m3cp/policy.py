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
from operator import mul
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
    """A policy as it is loaded from a file (`load`) or made from a comparison of rows (`from_comparisons`).

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
        read = _reads(context_lengths, self.shape)
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


def _reads(context_lengths: Sequence[int], shape: IndexerShape) -> Read:
    """What a batch reads; padding rows are no requests, and requests of at most topk blocks read nothing."""
    forced = shape.init_blocks + shape.local_blocks
    blocks = [shape.blocks(n) for n in context_lengths if n > 0]
    read = [max(0, b - forced) for b in blocks if b > shape.topk]
    return Read(sum(read), max(read, default=0), max(blocks, default=0), len(blocks))


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(map(mul, a, b))


def _evaluator(arm: Arm, query_len: int, block_mb: float) -> Callable[[Read], tuple[float, float]]:
    """A function of what a batch reads that gives (microseconds, variance); the sums are unrolled, for speed."""
    names = [f"x{i}" for i in range(len(arm.terms))]
    squares = [f"({_sum_text(row, names[i:])})**2" for i, row in enumerate(arm.root) if any(row)]
    both = f"(us := {_sum_text(arm.values, names)}, {' + '.join([f'{arm.spread**2!r}*us*us', *squares])})"
    sums, amounts = eval(f"lambda {', '.join(names)}: {both}"), arm.amounts(query_len, block_mb)  # numbers and x0, x1, ... alone

    def evaluate(read: Read) -> tuple[float, float]:
        return sums(*amounts(read))

    return evaluate


def _sum_text(factors: Sequence[float], names: Sequence[str]) -> str:
    """The sum of factors times names as an expression; zeros left out."""
    return " + ".join(f"{float(v)!r}*{name}" for v, name in zip(factors, names, strict=True) if v) or "0.0"


def _decider(entry: Entry, shape: IndexerShape) -> Callable[[Sequence[int]], Decision]:
    """A function of the context lengths alone, with everything else bound: what keeps a decision in microseconds."""
    size, topk, forced = shape.block_size, shape.topk, shape.init_blocks + shape.local_blocks
    (low, high), (few, many) = entry.context_tokens, entry.batch
    uneven, root2, erf, sqrt = entry.uneven + 0.02, math.sqrt(2.0), math.erf, math.sqrt
    shortest, tallest = shape.blocks(low), shape.blocks(high)
    block_mb = shape.key_bytes(entry.dtype) / 1e6
    tp, cp = (_evaluator(arm, entry.query_len, block_mb) for arm in (entry.tp, entry.cp))

    def decide(context_lengths: Sequence[int]) -> Decision:
        blocks = [-(-n // size) for n in context_lengths if n > 0]
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


def from_comparisons(
    found: Sequence[Any],
    run: str = "unknown",
    arm: str = "cp",
    exchange: str | None = None,
    queries: str | None = None,
    form: str | None = None,
) -> Policy:
    """A policy from the comparisons of a run (`crossover.comparisons`): their rows, all mixes of a cell together.

    Args:
        found: comparisons of one node and code hash.
        run: its name, for the provenance.
        arm: "cp", "vllm_cp" or "sglang_cp".
        exchange, queries, form: of the arm; None takes those of the comparison with most pairs.

    Raises:
        ValueError: no comparison of that kind, several nodes or code versions, or too few rows.
    """
    import numpy
    import pandas

    from m3cp import crossover
    from m3cp.fit import ALL_TERMS, fit_model
    from m3cp.frames import missing, require_same

    kinds = [c for c in found if c.pairs["arm"].iloc[0] == arm]
    for name, value in (("exchange", exchange), ("queries", queries), ("form", form)):
        if kinds:
            first = kinds[0].pairs[name].iloc[0]
            want = value if value is not None else (None if missing(first) else first)
            kinds = [c for c in kinds if (None if missing(c.pairs[name].iloc[0]) else c.pairs[name].iloc[0]) == want]
    if not kinds:
        known = sorted({c.name for c in found})
        raise ValueError(
            f"arm={arm!r} exchange={exchange!r} queries={queries!r} form={form!r}: no such comparison; there are {', '.join(known) or 'none'}"
        )
    everything = pandas.concat([c.frame for c in kinds], ignore_index=True)
    require_same(everything, ("node", "code_hash", "shape", "launch", "boundary"), "a policy")

    cells: dict[tuple[int, str, int], list[Any]] = {}
    for comparison in kinds:
        first = comparison.pairs.iloc[0]
        cells.setdefault((int(first["world"]), str(first["dtype"]), int(first["query_len"])), []).append(comparison)
    entries, states, mixes = [], set(), set()
    for (world, dtype, query_len), parts in sorted(cells.items()):
        arms = [
            pandas.concat(frames, ignore_index=True)
            for frames in zip(*(crossover.arm_frames(c) for c in parts), strict=True)
        ]
        arms = [a[~a["point"].map(str).duplicated() | (a["process"] > 0)] for a in arms]
        arms = [
            a[(a["bytes_read"] > 0) & (a["cache_state"] == "cold" if (a["cache_state"] == "cold").any() else True)]
            for a in arms
        ]
        if min(len(set(a["distinct_bytes_read"])) for a in arms) < 3:
            continue
        models = [fit_model(a, ALL_TERMS, vary=("mix",) if len(set(a["mix"])) > 1 else ()) for a in arms]
        if models[0].cache_state != models[1].cache_state:
            continue
        states.add(models[0].cache_state)
        mixes |= set(arms[1]["mix"])
        uneven = 0.0
        for point in arms[1]["point"]:
            uneven = max(uneven, _uneven(point))
        bounds = [
            tuple(int(f(m.range[n][i] for m in models)) for i, f in ((0, max), (1, min)))
            for n in ("context_tokens", "batch")
        ]
        entries.append(
            Entry(
                world,
                dtype,
                query_len,
                bounds[0],
                bounds[1],
                round(uneven, 4),
                *(_from_model(m, numpy) for m in models),
            )
        )
    if not entries:
        raise ValueError(
            f"arm={arm!r}: fewer than three sizes that read keys in every cell; sweep more contexts or batches"
        )
    first = kinds[0].pairs.iloc[0]
    texts = {name: None if missing(first[name]) else str(first[name]) for name in ("form", "exchange", "queries")}
    provenance = {
        "run": run, "node": str(first["node"]), "code_hash": str(first["code_hash"]), "commit": sorted(set(everything["commit"])),
        "cache_state": sorted(states), "mixes": sorted(mixes), "source": kinds[0].source, "rows": len(everything),
        "boundary": str(everything["boundary"].iloc[0]) or "the indexer alone; projections and attention out",
    }  # fmt: skip
    return Policy(arm=arm, shape=first["shape"], entries=tuple(entries), provenance=provenance, **texts)


def _uneven(point: Any) -> float:
    """Share of blocks that a Point's requests lack to its longest one."""
    from m3cp.traffic import context_lengths

    read = _reads(context_lengths(point), point.shape)
    return 1.0 - read.total / (read.requests * read.longest) if read.longest else 0.0


def _from_model(model: Any, numpy: Any) -> Arm:
    """A cost model as plain numbers: the terms that its rows identified and that cost something, or may."""
    from m3cp.fit import load

    kept = [i for i in range(len(model.terms)) if model.fit.usable[i] > 0 or model.fit.covariance[i, i] > 0]
    weights, vectors = numpy.linalg.eigh(model.fit.covariance[numpy.ix_(kept, kept)])
    upper = numpy.linalg.qr((vectors * numpy.sqrt(numpy.clip(weights, 0.0, None))).T, mode="r")  # covariance = upper' upper
    asked = load(model.template)
    return Arm(
        tuple(model.terms[i] for i in kept),
        tuple(float(f"{model.fit.values[i]:.9g}") for i in kept),
        tuple(tuple(float(f"{v:.9g}") if abs(v) > 1e-12 else 0.0 for v in row[i:]) for i, row in enumerate(upper)),
        float(f"{model.fit.spread:.6g}"),
        model.kernels,
        1 if model.arm.endswith("tp") else model.template.world,
        asked.heads,
        asked.sent_kib / asked.rows,
    )


@dataclass(frozen=True)
class Regret:
    """What each strategy loses to the oracle, as a share of the oracle's time, with 95% intervals.

    Args:
        always_tp, always_cp, policy, threshold: (share, low, high).
        steps: how many batches were judged; `refused` of them the policy refused (TP ran).
        near: only batches within 50% of break-even were judged.
        truth: what they were judged by: "modelled", or "measured" rows.
    """

    always_tp: tuple[float, float, float]
    always_cp: tuple[float, float, float]
    policy: tuple[float, float, float]
    threshold: tuple[float, float, float]
    threshold_blocks: int
    steps: int
    refused: int
    near: bool
    truth: str = "modelled"

    @property
    def strategies(self) -> dict[str, tuple[float, float, float]]:
        """{strategy: (share, low, high)}, in words."""
        switch = f"threshold of {self.threshold_blocks} blocks"
        return {"always TP": self.always_tp, "always CP": self.always_cp, "policy, per step": self.policy, switch: self.threshold}

    @property
    def table(self) -> list[str]:
        """The strategies as a Markdown table."""
        where = f"{self.steps} {self.truth} batches{' within 50% of break-even' if self.near else ''}"
        lines = [f"| loss against the oracle, {where} | | 95% |", "| --- | --- | --- |"]
        return lines + [f"| {k} | {100 * v:.2f}% | {100 * low:.2f} to {100 * high:.2f}% |" for k, (v, low, high) in self.strategies.items()]

    @property
    def best_constant(self) -> str:
        """Which of the two constants loses less: "tp" or "cp"."""
        return "tp" if self.always_tp[0] <= self.always_cp[0] else "cp"

    @property
    def needed(self) -> bool:
        """Whether deciding per step gains more over the best constant than its interval leaves in doubt, and 0.5%."""
        constant = self.always_tp if self.best_constant == "tp" else self.always_cp
        return constant[0] - self.policy[0] > 0.005 and constant[1] > self.policy[2]

    @property
    def text(self) -> str:
        """The verdict in words."""
        rows = ", ".join(f"{k} {100 * v:.2f}% (95% {100 * low:.2f} to {100 * high:.2f})" for k, (v, low, high) in self.strategies.items())
        head = f"over {self.steps} steps{' within 50% of break-even' if self.near else ''}, loss against the oracle: {rows}"
        head += f"; {self.refused} steps were outside the policy's range and ran TP" if self.refused else ""
        return f"{head}. {self.verdict}"

    @property
    def verdict(self) -> str:
        """Whether deciding per step pays, in words."""
        if 2 * self.refused > self.steps:
            return "Most of them were not measured, so this is no verdict: sweep such lengths first."
        if self.needed:
            return "Deciding per step pays."
        return f"No policy is needed: always {self.best_constant.upper()} does as well."


def regret(
    policy: Policy,
    batches: Sequence[Sequence[int]],
    world: int,
    dtype: str,
    query_len: int = 1,
    near: bool = True,
    draws: int = 400,
    seed: int = 0,
) -> Regret:
    """Loss of always-TP, always-CP, the policy and its threshold against an oracle, over decode batches.

    The truth is uncertain: it is drawn from the fitted models' joint uncertainty, and each strategy is judged by each
    draw. The oracle knows the draw.

    Args:
        batches: context lengths of each step.
        near: judge only batches within 50% of break-even: those that would break even at 0.5 to 1.5 times their
            lengths. All of them where none is near.
        draws, seed: of the bootstrap.

    Raises:
        ValueError: no batch.
    """
    import numpy

    require("batches", batches, len(batches) > 0, "at least one batch")
    entry, shape = policy.entry(world, dtype, query_len), policy.shape
    close = [b for b in batches if _near(policy, b, world, dtype, query_len)] if near else list(batches)
    near = near and bool(close)
    judged = close or list(batches)
    rng = numpy.random.default_rng(seed)
    costs = []
    for arm in (entry.tp, entry.cp):
        design = _amounts(arm, judged, query_len, shape, dtype)
        costs.append(numpy.maximum(_drawn(arm, draws, rng) @ design.T, 1e-9))
    tp, cp = costs  # [draws, steps]
    centre = numpy.array([policy.costs_us(b, world, dtype, query_len) for b in judged]).T
    return _judged(policy, judged, tp, cp, centre, near, "modelled", (world, dtype, query_len))


def regret_measured(policy: Policy, comparison: Any) -> Regret | None:
    """`regret` over the batches that were measured within 50% of break-even, judged by their rows and not by a model.

    The rows are those that the policy was fitted to; batches timed behind an evicting read are left out.

    Args:
        comparison: the uniform one of the policy's arm (`crossover.comparisons`).

    Returns:
        None where no measured batch lies so near.
    """
    import numpy

    first = comparison.pairs.iloc[0]
    key = (int(first["world"]), str(first["dtype"]), int(first["query_len"]))
    kept = [
        (batch, pair)
        for _, pair in comparison.pairs.iterrows()
        if pair["read"] and not pair["evicted"] and _near(policy, batch := [int(pair["context_tokens"])] * int(pair["batch"]), *key)
    ]
    if not kept:
        return None
    batches, pairs = [b for b, _ in kept], [p for _, p in kept]
    centre = numpy.array([[p["tp_us"] for p in pairs], [p["cp_us"] for p in pairs]])
    cp = centre[0] + numpy.stack([p["draws"] for p in pairs], axis=1)  # [draws, batches]
    return _judged(policy, batches, numpy.broadcast_to(centre[0], cp.shape), cp, centre, True, "measured", key)


def _judged(
    policy: Policy, batches: Sequence[Sequence[int]], tp: Any, cp: Any, centre: Any, near: bool, truth: str, key: tuple[int, str, int]
) -> Regret:  # fmt: skip
    """Losses of the strategies where TP and CP cost `[draws, batches]`, in the middle `centre` `[2, batches]`."""
    import numpy

    best = numpy.minimum(tp, cp).sum(axis=1)
    threshold = policy.threshold_blocks(*key, batches)
    decided = [policy.decide(b, *key) for b in batches]
    picks = {
        "always_tp": numpy.zeros(len(batches), bool),
        "always_cp": numpy.ones(len(batches), bool),
        "policy": numpy.array([d.path == "cp" for d in decided]),
        "threshold": numpy.array([sum(policy.shape.blocks(n) for n in b) > threshold for b in batches]),
    }
    found = {}
    for name, pick in picks.items():
        loss = numpy.where(pick, cp, tp).sum(axis=1) / best - 1.0
        middle = float(numpy.where(pick, centre[1], centre[0]).sum() / numpy.minimum(*centre).sum() - 1.0)
        low, high = numpy.percentile(loss, [2.5, 97.5])
        found[name] = (middle, float(min(low, middle)), float(max(high, middle)))
    return Regret(
        **found, threshold_blocks=threshold, steps=len(batches), refused=sum(d.refused for d in decided), near=near, truth=truth
    )


def near_break_even(policy: Policy, world: int, dtype: str, query_len: int = 1) -> list[list[int]]:
    """Uniform batches of the policy's range with contexts within 50% of break-even, at batches 1, 2, 4, ...

    Eleven contexts a batch, from half of its break-even to one and a half of it; batches without one are left out.
    """
    entry, step = policy.entry(world, dtype, query_len), policy.shape.block_size * world
    (low, high), found = entry.context_tokens, []
    for batch in (2**i for i in range(entry.batch[1].bit_length()) if entry.batch[0] <= 2**i <= entry.batch[1]):
        wins = []
        for context in range(-(-low // step) * step, high + 1, step):
            tp, cp = policy.costs_us([context] * batch, world, dtype, query_len)
            wins.append((context, tp > cp))
        last = max((c for c, won in wins if not won), default=None)
        if last is None or last == wins[-1][0]:
            continue
        contexts = {round(last * (0.5 + 0.1 * i) / step) * step for i in range(11)}
        found += [[c] * batch for c in sorted(contexts) if low <= c <= high]
    return found


def _amounts(arm: Arm, batches: Sequence[Sequence[int]], query_len: int, shape: IndexerShape, dtype: str) -> Any:
    """What an arm's terms multiply in each batch, `[batches, terms]`."""
    import numpy

    amounts = arm.amounts(query_len, shape.key_bytes(dtype) / 1e6)
    return numpy.array([amounts(_reads(b, shape)) for b in batches])


def _drawn(arm: Arm, draws: int, rng: Any) -> Any:
    """Draws of an arm's values from their joint uncertainty, `[draws, terms]`."""
    import numpy

    size = len(arm.terms)
    upper = numpy.zeros((size, size))
    for i, row in enumerate(arm.root):
        upper[i, i:] = row
    return numpy.array(arm.values) + rng.standard_normal((draws, size)) @ upper


def _near(policy: Policy, batch: Sequence[int], world: int, dtype: str, query_len: int) -> bool:
    signs = []
    for scale in (0.5, 1.5):
        tp, cp = policy.costs_us([round(n * scale) for n in batch], world, dtype, query_len)
        signs.append(tp > cp)
    return signs[0] != signs[1]


@dataclass(frozen=True)
class Static:
    """The answer for an engine, whose switch is set at start-up, and a traffic.

    Args:
        path: "cp" or "tp".
        gain_us: mean TP - CP a layer and step, (value, low, high).
        relative: that gain as a share of TP's time.
        confidence: probability that the path is the faster one over this traffic.
        steps, refused: judged, and outside of the policy's range.
    """

    path: str
    gain_us: tuple[float, float, float]
    relative: float
    confidence: float
    steps: int
    refused: int

    @property
    def text(self) -> str:
        """The answer as a sentence."""
        value, low, high = self.gain_us
        word = "turn context parallelism on" if self.path == "cp" else "leave context parallelism off"
        if self.steps == 0:
            return f"undecided: all {self.refused} steps lie outside what was measured"
        if low < 0 < high:
            word = f"undecided, {word} if one must choose"
        extra = f"; {self.refused} further steps lie outside what was measured and are left out" if self.refused else ""
        return f"{word}: over {self.steps} steps CP changes a layer by {-value:+.2f} us (95% {-high:+.2f} to {-low:+.2f}), {-100 * self.relative:+.1f}% of the indexer, confidence {self.confidence:.0%}{extra}"


def static(
    policy: Policy,
    batches: Sequence[Sequence[int]],
    world: int,
    dtype: str,
    query_len: int = 1,
    draws: int = 400,
    seed: int = 0,
) -> Static:
    """On or off for a whole traffic: the mean gain a layer over its steps, with the fit's uncertainty.

    Args:
        batches: context lengths of each step; those outside the policy's range are counted and left out.
    """
    import numpy

    entry, shape = policy.entry(world, dtype, query_len), policy.shape
    inside = [b for b in batches if not policy.decide(b, world, dtype, query_len).refused]
    refused = len(batches) - len(inside)
    if not inside:
        return Static("tp", (0.0, 0.0, 0.0), 0.0, 0.0, 0, refused)
    rng = numpy.random.default_rng(seed)
    means, drawn = [], []
    for arm in (entry.tp, entry.cp):
        mean = _amounts(arm, inside, query_len, shape, dtype).mean(axis=0)
        means.append(float(mean @ numpy.array(arm.values)))
        drawn.append(_drawn(arm, draws, rng) @ mean)
    gain = means[0] - means[1]
    low, high = (float(v) for v in numpy.percentile(drawn[0] - drawn[1], [2.5, 97.5]))
    sure = float(numpy.mean((drawn[0] > drawn[1]) == (gain > 0)))
    return Static(
        "cp" if gain > 0 else "tp", (gain, low, high), gain / means[0] if means[0] else 0.0, sure, len(inside), refused
    )


def _near_lines(made: Policy, entry: Entry, found: Sequence[Any], figures: Path | str | None, loaded: Any) -> list[str]:
    """Regret near break-even for one entry, by the model and by measured rows: tables, verdicts, and where the figure is."""
    key = (entry.world, entry.dtype, entry.query_len)
    batches = near_break_even(made, *key)
    judged = [dataclasses.replace(regret(made, batches, *key, near=False), near=True)] if batches else []
    same = [c for c in found if _describes(made, entry, c)]
    judged += [r for r in [regret_measured(made, same[0])] if r] if same else []
    lines = []
    for each in judged:
        lines += ["", *each.table, "", each.verdict]
    if figures is not None and judged:
        from m3cp import plots

        name = "_".join(["regret", *(v for v in (made.arm, made.form, made.exchange, made.queries) if v), f"p{entry.world}", entry.dtype, f"q{entry.query_len}"])
        drawn = plots.save(plots.regrets(judged), name, run=loaded.name, commit=loaded.commit, folder=Path(figures) / loaded.name)
        lines += ["", *(f"  {path}" for path in drawn)]
    return [*lines, ""] if lines else []


def _describes(policy: Policy, entry: Entry, comparison: Any) -> bool:
    """Whether a comparison holds uniform rows of a policy's entry."""
    from m3cp.frames import missing

    first = comparison.pairs.iloc[0]
    ways = all((None if missing(first[n]) else first[n]) == getattr(policy, n) for n in ("arm", "form", "exchange", "queries"))
    return ways and first["mix"] == "uniform" and all(first[n] == getattr(entry, n) for n in ("world", "dtype", "query_len"))


def main(run: str = "", out: Path | str | None = None, arm: str = "cp", exchange: str | None = None, queries: str | None = None, form: str | None = None,
         traffic: Path | str | None = None, trace: Path | str | None = None, world: int | None = None, dtype: str = "bf16", query_len: int = 1,
         figures: Path | str | None = None) -> list[str]:  # fmt: skip
    """What `m3cp policy` does: fit a run, write its policy, judge it near break-even, and answer for a traffic.

    Returns the lines to print.

    Args:
        run: a run's folder or name; "" for the latest (`frames.find_run`).
        out: where the policy goes; None writes `policy_<arm>.json` beside the rows.
        arm, exchange, queries, form: what it decides for; None takes what most pairs have.
        traffic: JSON lines of context lengths a step (`workload.read`).
        trace: JSON lines of requests (`workload.read_trace`), turned into steps.
        world: ranks, for the answers; None takes the largest measured.
        dtype, query_len: for the answers.
        figures: folder for the figures of regret, one for each entry; None draws none.

    Raises:
        ValueError, FileNotFoundError: in words, as the functions called do.
    """
    from m3cp import crossover, frames, workload
    from m3cp.fit import ALL_TERMS

    loaded = frames.load_run(run)
    found = crossover.comparisons(loaded.frame, ALL_TERMS, draws=200)
    made = from_comparisons(found, loaded.name, arm, exchange, queries, form)
    path = made.save(out if out else frames.find_run(run) / f"policy_{arm}.json")
    lines = [
        f"policy of {loaded.name} for {'/'.join(v for v in (made.arm, made.form, made.exchange, made.queries) if v)}: {path}"
    ]
    for entry in made.entries:
        lines.append(
            f"  P = {entry.world}, {entry.dtype}, {entry.query_len} query tokens: contexts {entry.context_tokens[0]} to {entry.context_tokens[1]}, batches "
            f"{entry.batch[0]} to {entry.batch[1]}; one threshold: {made.threshold_blocks(entry.world, entry.dtype, entry.query_len)} blocks"
        )
        lines += _near_lines(made, entry, found, figures, loaded)
    if traffic and trace:
        raise ValueError("traffic and trace: give one of them")
    if traffic or trace:
        steps = workload.read(traffic) if traffic else workload.from_trace(workload.read_trace(trace))
        ranks = world or max(e.world for e in made.entries)
        made.entry(ranks, dtype, query_len)  # says what there is, where this is not
        batches = [s.context_lengths for s in steps]
        lines.append(
            f"{Path(traffic or trace).name} at P = {ranks}, {dtype}: {static(made, batches, ranks, dtype, query_len).text}"
        )
        lines.append(regret(made, batches, ranks, dtype, query_len).text)
        shared = sum(s.distinct_tokens for s in steps) / sum(sum(s.context_lengths) for s in steps)
        if shared < 0.95:
            lines.append(
                f"Requests share prefixes: {shared:.0%} of the cached tokens are distinct, and the policy counts all of them. Measure with a shared prefix to know."
            )
    return lines
