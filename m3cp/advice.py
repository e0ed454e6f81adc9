"""A policy made from a run's rows, and what it is worth: the static answer for a traffic, and regret against an oracle.

The analysis side of `policy`, which engines load: here numpy and pandas are used, there neither.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m3cp.policy import Arm, Entry, Policy, reads
from m3cp.shapes import IndexerShape, require


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
        arms = [a[~a.assign(point=a["point"].map(str)).duplicated(["point", "process"])] for a in arms]
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

    read = reads(context_lengths(point), point.shape)
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
    return numpy.array([amounts(reads(b, shape)) for b in batches])


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
