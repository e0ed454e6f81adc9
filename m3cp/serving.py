"""From microseconds a layer to milliseconds a token: what CP changes for a served model, and what it doesn't explain.

Everything here is a *change* between TP and CP: other parts of a step are the same in both arms, so no model of the
whole engine is needed, only a baseline's time per output token where a percentage is asked for.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from m3cp.crossover import SPARSE_LAYERS, across_worlds, tokens_about
from m3cp.fit import PEER_US, CostModel, assume
from m3cp.frames import ROOT
from m3cp.results import Compared, compare
from m3cp.shapes import require
from m3cp.workload import DECODING_SHARE

# Tokens accepted a step with so many drafts: 2.78 with three is what vLLM's authors report of EAGLE3
# (data/published/README.md); five is assumed to add little.
ACCEPTED = {0: 1.0, 3: 2.78, 5: 3.1}


@dataclass(frozen=True)
class Setting:
    """What of a served model turns microseconds a layer into milliseconds a token.

    Args:
        layers: sparse layers a step.
        reuse: layers that share one selection: 1 scores in every layer, 4 in every fourth.
        acceptance: tokens a step gives each request (1 without speculation).
        eager_share: share of decode steps that carry prefill too and so run outside a graph, 0 to 1.
        eager_extra_us: what CP costs a layer more than TP in such a step (host time of its launches).

    Raises:
        ValueError: naming the argument.
    """

    layers: int = SPARSE_LAYERS
    reuse: int = 1
    acceptance: float = 1.0
    eager_share: float = 0.0
    eager_extra_us: float = 0.0

    def __post_init__(self) -> None:
        require("layers", self.layers, self.layers >= 1, "at least 1")
        require("reuse", self.reuse, 1 <= self.reuse <= self.layers, f"1 to layers={self.layers}")
        require("acceptance", self.acceptance, self.acceptance >= 1, "at least 1 token a step")
        require("eager_share", self.eager_share, 0 <= self.eager_share <= 1, "0 to 1")

    @property
    def scoring_layers(self) -> int:
        """Layers a step that score: one of every `reuse`."""
        return math.ceil(self.layers / self.reuse)

    def ms(self, us: float) -> float:
        """Milliseconds an output token of `us` microseconds a scoring layer."""
        return us * self.scoring_layers / 1000.0 / self.acceptance

    def change_ms(self, delta_us: float) -> float:
        """Milliseconds an output token that CP - TP of `delta_us` a layer changes; negative is faster."""
        return self.ms(delta_us + self.eager_share * self.eager_extra_us)


def decode_batch(
    concurrency: float, output_tokens: float, tpot_ms: float | Callable[[float], float], other_s: float
) -> float:
    """Requests that decode at once when `concurrency` are offered: batch = C * t_decode / (t_decode + t_other).

    Args:
        concurrency: requests offered at once.
        output_tokens: a request.
        tpot_ms: time per output token, a number or a function of the batch that does not fall with it.
        other_s: time a request spends otherwise: queue, prefill, tools of an agent.

    Raises:
        ValueError: an argument that is not positive (`other_s` may be 0).
    """
    for name, value in (("concurrency", concurrency), ("output_tokens", output_tokens)):
        require(name, value, value > 0, "positive")
    require("other_s", other_s, other_s >= 0, "0 or more seconds")
    if not callable(tpot_ms):
        require("tpot_ms", tpot_ms, tpot_ms > 0, "positive")
    low, high = 0.0, float(concurrency)
    for _ in range(60):  # the right side rises with the batch, more slowly than the batch: bisect
        middle = (low + high) / 2
        decode_s = output_tokens * (tpot_ms(middle) if callable(tpot_ms) else tpot_ms) / 1000.0
        if concurrency * decode_s / (decode_s + other_s) > middle:
            low = middle
        else:
            high = middle
    return high


def batch_distribution(concurrency: int, share: float) -> list[tuple[int, float]]:
    """[(batch, probability)] of a decode step when each offered request decodes with probability `share`; at least one.

    Raises:
        ValueError: a share outside (0, 1], or no concurrency.
    """
    require("concurrency", concurrency, concurrency >= 1, "at least 1")
    require("share", share, 0 < share <= 1, "above 0, up to 1")
    weights = [
        math.comb(concurrency, k) * share**k * (1 - share) ** (concurrency - k) for k in range(1, concurrency + 1)
    ]
    return [(k, w / sum(weights)) for k, w in enumerate(weights, start=1) if w / sum(weights) > 1e-6]


@dataclass(frozen=True)
class Change:
    """CP's change of time per output token, milliseconds, with its 95% interval; negative is faster."""

    ms: float
    low_ms: float
    high_ms: float
    assumed: str = ""

    def percent(self, baseline_ms: float) -> float:
        """The change as a share of a baseline's time per output token, in percent."""
        return 100.0 * self.ms / baseline_ms


def tpot_change(
    tp: CostModel,
    cp: CostModel,
    context_tokens: int,
    batches: Sequence[tuple[int, float]],
    setting: Setting = Setting(),
    draws: int = 400,
    **changes: Any,
) -> Change:  # noqa: B008
    """The change of time per output token over a distribution of decode batches.

    Args:
        tp, cp: cost models of one comparison.
        context_tokens: of each request.
        batches: [(batch, weight)]; `batch_distribution` makes one.
        setting: of the served model.
        draws: of the bootstrap.
        changes: other fields of the Points, such as dtype, world or query_len.
    """
    import numpy

    from m3cp.crossover import difference

    weights = numpy.array([w for _, w in batches], dtype=float)
    best, drawn = difference(tp, cp, [(context_tokens, b) for b, _ in batches], draws, **changes)
    mean, spread = float(best @ weights / weights.sum()), drawn @ weights / weights.sum()
    low, high = (float(v) for v in numpy.percentile(spread, [2.5, 97.5]))
    point = cp.point(context_tokens, batches[0][0], **changes)
    return Change(
        setting.change_ms(mean),
        setting.change_ms(min(low, mean)),
        setting.change_ms(max(high, mean)),
        cp.predict(point).assumed,
    )


def cold(model: CostModel) -> CostModel:
    """A model fitted to warm rows, asked for a cold cache: every byte at the rate beyond the last-level cache.

    A served layer finds its index cache cold, since the other layers went by. Where no row was larger than the cache,
    that rate was not seen and the warm one stands in.
    """
    return replace(model, cache_state="cold", kernels=model.kernels._replace(llc_mb=0.0))


def levers(
    tp: CostModel,
    cp: CostModel,
    context_tokens: int,
    batch: int,
    setting: Setting = Setting(),
    wide: tuple[CostModel, CostModel] | None = None,
):  # noqa: B008
    """What each lever does to the indexer's time per token and to memory, one lever at a time.

    Args:
        tp, cp: cost models of one comparison; other dtypes are predicted and say what they assume.
        context_tokens, batch: of the whole deployment (two replicas of TP4 get half of the batch each).
        setting: of the served model; its acceptance is that of no speculation.
        wide: of `crossover.across_worlds`, for other numbers of ranks; None makes do with `tp` and `cp`. What a further
            rank adds to an exchange rests on the stated prior where no row tells.

    Returns:
        A frame with lever, tp_ms, cp_ms, better ("tp" or "cp"), index_gib (index keys on each GPU) and note.
    """
    import pandas

    shape, dtype = cp.template.shape, cp.template.dtype
    fp8 = {"bf16": "fp8_e4m3fn", "fp16": "fp8_e4m3fn"}.get(dtype, "bf16")
    plan: list[tuple[str, int, dict[str, Any], Setting]] = [
        (f"as measured: TP{cp.template.world}, {dtype}", batch, {}, setting)
    ]
    plan.append((f"{fp8} cache", batch, {"dtype": fp8}, setting))
    plan += [(f"TP{world}", batch, {"world": world}, setting) for world in (4, 8) if world != cp.template.world]
    plan.append(("2 x TP4", max(1, batch // 2), {"world": 4}, setting))
    for drafts, accepted in ACCEPTED.items():
        if drafts:
            plan.append(
                (f"{drafts} draft tokens", batch, {"query_len": drafts + 1}, replace(setting, acceptance=accepted))
            )
    plan.append(("selection reused over 4 layers", batch, {}, replace(setting, reuse=4)))
    lines = []
    for name, requests, changes, each in plan:
        models = (tp, cp)
        if changes.get("world", cp.template.world) != cp.template.world:
            prior = {"peers": PEER_US[cp.template.exchange or "collective"]}
            models = wide or (tp, assume(cp, prior) if "peers" in cp.fit.unidentified else cp)
        ms, notes = [], []
        for model in models:
            found = model.predict(model.point(context_tokens, requests, **changes))
            ms.append(each.ms(found.us))
            notes += [
                n for n in (found.assumed, f"extrapolated: {found.extrapolated}" if found.extrapolated else "") if n
            ]
        if changes.get("dtype"):
            notes.append("assuming that time follows bytes")
        if "query_len" in changes:
            notes.append(f"{each.acceptance:g} tokens a step")
        if each.reuse > 1:
            notes.append("changes answers")
        key_bytes = shape.key_bytes(changes.get("dtype", dtype))
        gib = requests * shape.blocks(context_tokens) * key_bytes * setting.layers / 2**30
        lines.append(
            {
                "lever": name,
                "tp_ms": ms[0],
                "cp_ms": ms[1],
                "better": "cp" if ms[1] < ms[0] else "tp",
                "index_gib": gib,
                "note": "; ".join(dict.fromkeys(notes)),
            }
        )
    return pandas.DataFrame.from_records(lines)


def against_published(tp: CostModel, cp: CostModel, folder: Path | str | None = None):
    """Published serving changes beside what the layer's microseconds predict, and how much of them that explains.

    Args:
        tp, cp: cost models of the published latencies on four MI355X, or of another comparison at world 4.
        folder: of the published tables.

    Returns:
        A frame with source, context_tokens, concurrency, measured (text), measured_ms (NaN where only a percentage is
        given), predicted_ms, predicted_low_ms, predicted_high_ms, sign ("agrees", "differs" or "break-even"),
        explained (predicted over measured; NaN where unknown), and verdict in words.
    """
    import pandas

    folder = Path(folder) if folder else ROOT / "data" / "published"
    tp, cp = cold(tp), cold(cp)
    lines = []
    for line in _table(folder / "agentx_mi355x_tp4.csv"):
        if not line["baseline_itl_ms"]:
            continue
        context, concurrency = round((int(line["isl_baseline"]) + int(line["isl_cp"])) / 2), int(line["concurrency"])
        measured = float(line["cp_itl_ms"]) - float(line["baseline_itl_ms"])
        guesses = [
            tpot_change(tp, cp, context, batch_distribution(concurrency, share), dtype="bf16")
            for share in (*DECODING_SHARE, 1.0)
        ]
        lines.append(
            _judge(
                f"AgentX, {line['run']}",
                context,
                concurrency,
                f"{line['baseline_itl_ms']} to {line['cp_itl_ms']} ms",
                measured,
                guesses,
            )
        )
    for line in _table(folder / "tpot_mi350x_tp4.csv"):
        context, concurrency = int(line["isl_tokens"]), int(line["concurrency"])
        low, high = float(line["tpot_change_pct_low"]), float(line["tpot_change_pct_high"])
        text = f"{low:+.0f}%" if low == high else f"{low:+.0f} to {high:+.0f}%"
        guesses = [
            tpot_change(tp, cp, context + 512, [(b, 1.0)], dtype="bf16") for b in (concurrency,)
        ]  # half of the 1,024 output tokens
        lines.append(_judge("TPOT", context, concurrency, text, math.nan, guesses, (low + high) / 2))
    return pandas.DataFrame.from_records(lines)


def _judge(
    source: str,
    context: int,
    concurrency: int,
    text: str,
    measured: float,
    guesses: Sequence[Change],
    percent: float | None = None,
) -> dict[str, Any]:
    """One published figure beside its prediction; the first guesses are the likely batches, the last all of them."""
    likely = guesses[:-1] or guesses
    predicted = sum(g.ms for g in likely) / len(likely)
    low, high = min(g.low_ms for g in likely), max(g.high_ms for g in likely)
    direction = measured if percent is None else percent
    if direction == 0:
        sign = "break-even"
        verdict = (
            "break-even lies within the prediction's interval"
            if low <= 0 <= high
            else f"published as break-even, predicted {predicted:+.2f} ms"
        )
    else:
        sign = "agrees" if (predicted < 0) == (direction < 0) else "differs"
        verdict = ""
    explained = predicted / measured if percent is None else math.nan
    if percent is None:
        most = guesses[-1].ms / measured
        verdict = f"the indexer explains {max(0.0, explained):.0%} of the measured change with 22 to 41% of requests decoding, {max(0.0, most):.0%} if all were"
        if most < 0.8:
            verdict += ": the rest is not explained by the layer's time"
    elif percent:
        base = 100 * predicted / percent
        verdict = (
            f"would be {percent:+.0f}% of a step of {base:.1f} ms"
            if base > 0
            else "the sign is not explained by the layer's time"
        )
    return {
        "source": source, "context_tokens": context, "concurrency": concurrency, "measured": text, "measured_ms": measured, "predicted_ms": predicted,
        "predicted_low_ms": low, "predicted_high_ms": high, "sign": sign, "explained": explained, "verdict": verdict,
    }  # fmt: skip


def _table(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def predict_for(
    compared: Compared,
    tp: CostModel,
    cp: CostModel,
    other_s: float | None = None,
    setting: Setting | None = None,
    **changes: Any,
) -> Change:
    """What the cost models predict for a pair of runs.

    Args:
        compared: of `compare`.
        tp, cp: cost models of one comparison.
        other_s: time a request spends not decoding; None takes 22 to 41% of the concurrency as decoding.
        setting: of the served model; None takes the run's own acceptance length.
        changes: other fields of the Points, such as dtype.
    """
    base = compared.base
    concurrency = base.concurrency or 1
    setting = setting or Setting(acceptance=max(1.0, base.acceptance or 1.0))
    context = round(base.input_tokens + (base.output_tokens if math.isfinite(base.output_tokens) else 0.0) / 2)
    if other_s is not None:
        batch = decode_batch(concurrency, base.output_tokens, base.tpot_ms, other_s)
        return tpot_change(tp, cp, context, [(max(1, round(batch)), 1.0)], setting, **changes)
    found = [
        tpot_change(tp, cp, context, batch_distribution(concurrency, share), setting, **changes)
        for share in DECODING_SHARE
    ]
    return Change(
        sum(f.ms for f in found) / len(found),
        min(f.low_ms for f in found),
        max(f.high_ms for f in found),
        found[0].assumed,
    )


def beside(pair: Compared, predicted: Change) -> str:
    """A measured pair and its prediction in words: as predicted, or how much of the change the layer's time explains."""
    share = predicted.ms / pair.change_ms if pair.change_ms else math.nan
    if predicted.low_ms <= pair.change_ms <= predicted.high_ms:
        word = "as predicted"
    else:
        word = f"the layer's time explains {max(0.0, share):.0%} of it" if math.isfinite(share) else "no change was measured"
    return f"{pair.text}; predicted {predicted.ms:+.2f} ms (95% {predicted.low_ms:+.2f} to {predicted.high_ms:+.2f}): {word}"


def main(
    run: str = "",
    context_tokens: int = 74_000,
    batch: int = 8,
    reuse: int = 1,
    acceptance: float = 1.0,
    concurrency: int | None = None,
) -> list[str]:
    """What `m3cp serving` does: levers for a run's cost model, and the published figures; returns the lines to print.

    Args:
        run: a run's folder or name; "" for the latest.
        context_tokens, batch: of the deployment; the defaults are the AgentX traces' mean input and a small batch.
        reuse, acceptance: of `Setting`.
        concurrency: requests offered at once, of which 22 to 41% decode in a step: the change over those batches, too.

    Raises:
        ValueError, FileNotFoundError: in words, as the functions called do.
    """
    loaded, comparison = _headline(run)
    setting = Setting(reuse=reuse, acceptance=acceptance)
    change = tpot_change(comparison.tp, comparison.cp, context_tokens, [(batch, 1.0)], setting)
    lines = [
        f"{loaded.name}, {comparison.name}: {tokens_about(context_tokens)} tokens, batch {batch}: CP changes the time per output token by {change.ms:+.3f} ms (95% {change.low_ms:+.3f} to {change.high_ms:+.3f})",
        *_offered(comparison, context_tokens, concurrency, setting), "", "| lever | TP ms a token | CP ms a token | faster | index keys a GPU, GiB | note |", "| --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    wide = across_worlds(loaded.frame, comparison)
    for _, row in levers(comparison.tp, comparison.cp, context_tokens, batch, setting, wide).iterrows():
        lines.append(
            f"| {row['lever']} | {row['tp_ms']:.3f} | {row['cp_ms']:.3f} | {row['better'].upper()} | {row['index_gib']:.2f} | {row['note']} |"
        )
    published = published_models()
    lines += [
        "",
        "Published serving figures against the published microseconds a layer (SGLang's kernels, warm, fp8; served: vLLM's, bf16):",
        "",
    ]
    lines += [
        "| figure | context | concurrency | measured | predicted ms | verdict |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for _, row in against_published(*published).iterrows():
        lines.append(
            f"| {row['source']} | {tokens_about(row['context_tokens'])} | {row['concurrency']} | {row['measured']} | {row['predicted_ms']:+.2f} | {row['verdict']} |"
        )
    return lines


def _offered(comparison: Any, context_tokens: int, concurrency: int | None, setting: Setting) -> list[str]:
    """What CP changes where `concurrency` requests are offered, at both ends of the share that decodes."""
    if concurrency is None:
        return []
    lines = []
    for share in DECODING_SHARE:
        found = tpot_change(comparison.tp, comparison.cp, context_tokens, batch_distribution(concurrency, share), setting)
        lines.append(
            f"{concurrency} offered, {share:.0%} decoding: {found.ms:+.3f} ms a token (95% {found.low_ms:+.3f} to {found.high_ms:+.3f})"
        )
    return lines


def published_models() -> tuple[CostModel, CostModel]:
    """Cost models (TP, CP) of the published latencies on four MI355X."""
    from m3cp.crossover import comparisons, headline
    from m3cp.fit import ALL_TERMS
    from m3cp.frames import published

    found = headline(comparisons(published(), ALL_TERMS, noise=0.05, draws=20))
    return found.tp, found.cp


def _headline(run: str) -> tuple[Any, Any]:
    from m3cp.crossover import comparisons, headline
    from m3cp.fit import ALL_TERMS
    from m3cp.frames import default_node, load_run

    loaded = load_run(run or default_node())
    found = headline(comparisons(loaded.frame, ALL_TERMS, draws=50))
    if found is None or found.tp is None or found.cp is None:
        raise ValueError(
            f"run={run!r}: {loaded.name} has no CP rows beside TP rows at two sizes; nothing to estimate from"
        )
    return loaded, found


def main_import(
    base: Path | str,
    cp: Path | str,
    run: str | None = None,
    figures: Path | str = "figures",
    other_s: float | None = None,
) -> list[str]:
    """What `m3cp serving import` does: compare two results, predict from a run, draw; returns the lines to print.

    Args:
        base, cp: files of `vllm bench serve` or aiperf, without CP and with it.
        run: whose cost model predicts; None predicts nothing and draws nothing, "" is the latest run.
        figures: folder for the figure.
        other_s: seconds a request spends not decoding, if known.

    Raises:
        ValueError, FileNotFoundError: in words, as the functions called do.
    """
    pair = compare(base, cp)
    if run is None:
        return [pair.text]
    import pandas

    from m3cp import plots

    loaded, comparison = _headline(run)
    predicted = predict_for(pair, comparison.tp, comparison.cp, other_s)
    line = {
        "source": pair.base.tool, "concurrency": pair.base.concurrency or 1, "measured_ms": pair.change_ms, "predicted_ms": predicted.ms,
        "predicted_low_ms": predicted.low_ms, "predicted_high_ms": predicted.high_ms,
    }  # fmt: skip
    paths = plots.save(
        plots.served(pandas.DataFrame([line])), "serving_import", run=loaded.name, commit=loaded.commit, folder=figures
    )
    return [beside(pair, predicted), *map(str, paths)]
