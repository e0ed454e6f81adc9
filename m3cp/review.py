"""What a design review argues from and says: a run, and maybe a traffic, as sentences and tables.

`gather` reads and compares; each function after it says one thing of the result, in words or as an HTML table. The
figures and the page are `report`'s. Nothing is measured here. Neither torch nor triton is imported.
"""

from __future__ import annotations

import dataclasses
import functools
import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from m3cp import advice, break_even_lines, crossover, engines, fit, frames, heldout, plots, policy, serving, workload
from m3cp.crossover import SPARSE_LAYERS, tokens_about

REFERENCE_TOKENS = (2**13, 2**16, 2**18, 2**20, 2**22)  # cached tokens a step at which gains are quoted, where measured
LIMITS = (
    "<b>Reads are saved, not capacity.</b> Every rank still holds the whole index-key cache; CP only reads 1/P of it.",
    "<b>Not a throughput claim.</b> Microseconds of the indexer alone, back to back in a graph; projections and attention "
    "are outside. Milliseconds a token are these times the model's {layers} sparse layers.",
    "<b>Decode only.</b> Prefill reads the cache once for many tokens and stays unsharded.",
    "<b>Replicated queries</b> read the weights of the other ranks' heads too; rows say whether that is charged, and "
    "the answer above is for gathered queries, which pay for their own exchange.",
    "<b>What was not measured is modelled and says so</b>: other numbers of ranks, other dtypes, contexts between points.",
)


@dataclass(frozen=True)
class Choice:
    """One way to turn CP on, against the tensor-parallel baseline of the same kernels.

    Args:
        name: for what it is, such as "m3cp kernels, staged, NCCL; queries gathered".
        comparison: its pairs and fits, uniform lengths.
        policy: what decides for a traffic; None without one, or where too few sizes were measured (`why` says so).
    """

    name: str
    comparison: crossover.Comparison
    policy: policy.Policy | None
    why: str = ""

    @property
    def first(self) -> Any:
        """The pair that names arm, form, exchange and queries."""
        return self.comparison.pairs.iloc[0]


@dataclass(frozen=True)
class Review:
    """What the page argues from.

    Args:
        run: the rows of one node and one code version.
        choices: ways to turn CP on, the answer's own first.
        traffic: name of the reader's traffic, "" for none; `steps` are its decode batches.
        left_out: rows of other machines or code versions in the same run, not used.
    """

    run: frames.Loaded
    choices: tuple[Choice, ...]
    traffic: str = ""
    steps: tuple[workload.Step, ...] = ()
    left_out: int = 0

    @property
    def main(self) -> crossover.Comparison:
        """The comparison that the page is about."""
        return self.choices[0].comparison

    @functools.cached_property
    def aims(self) -> list[heldout.Target]:
        """What was aimed at for the cost model of the page's comparison, and what it came to."""
        return heldout.targets(self.main)

    @property
    def where(self) -> str:
        """Node, ranks and dtype in words."""
        first = self.choices[0].first
        narrow = frames.overlap_words(self.choices[0].comparison.pairs)
        return f"{first['node']}, P = {first['world']}, {first['dtype']}" + (f" ({narrow})" if narrow else "")


def gather(run: str = "", traffic: str = "") -> Review:
    """Gather a run's comparisons, and a traffic's steps.

    Args:
        run: a run's folder or name, or "" for `frames.default_node`.
        traffic: a file of decode steps (`workload.read`), or "".

    Raises:
        FileNotFoundError: no such run or file.
        ValueError: a run without CP rows beside TP rows over enough sizes for a fit, or a bad line in the traffic.
    """
    steps = tuple(workload.read(traffic)) if traffic else ()
    loaded = frames.load_run(run or frames.default_node())
    kept = max(frames.groups(loaded.frame, ("node", "code_hash")).items(), key=lambda item: len(item[1]))[0]
    mine = (loaded.frame["node"] == kept[0]) & (loaded.frame["code_hash"] == kept[1])
    left_out = int((~mine).sum())
    loaded = dataclasses.replace(loaded, frame=loaded.frame[mine].reset_index(drop=True))
    found = crossover.comparisons(loaded.frame, fit.ALL_TERMS)
    grids = [c for c in crossover.grids(found) if c.pairs["mix"].iloc[0] == "uniform" and c.tp and c.cp]
    head = crossover.headline(grids)
    if head is None:
        raise ValueError(
            f"{loaded.name}: no CP rows beside TP rows over three sizes that read keys, so there is nothing to decide; sweep more contexts"
        )
    alike = (
        "world",
        "dtype",
        "query_len",
        "shape",
        "cache",
        "launch",
        "boundary",
        "rows_padded",
        "shared_prefix_tokens",
    )
    same = [c for c in grids if all(c.pairs[n].iloc[0] == head.pairs[n].iloc[0] for n in alike)]
    seen: dict[str, Choice] = {}
    for comparison in same:
        first = comparison.pairs.iloc[0]
        name = who(crossover.arm_frames(comparison)[1].iloc[0], loaded.frame)
        if not steps:
            seen.setdefault(name, Choice(name, comparison, None, "no traffic was given"))
            continue
        try:
            made, why = (
                advice.from_comparisons(
                    found, loaded.name, first["arm"], *(given(first[n]) for n in ("exchange", "queries", "form"))
                ),
                "",
            )
        except ValueError as error:
            made, why = None, str(error)
        seen.setdefault(name, Choice(name, comparison, made, why))
    return Review(loaded, tuple(seen.values()), Path(traffic).name if traffic else "", steps, left_out)


def given(value: Any) -> Any:
    """A frame's value, None where it is missing."""
    return None if frames.missing(value) else value


def who(line: Any, frame: Any) -> str:
    """An arm named for what it is: whose kernels, which transport, how queries are shared.

    Args:
        line: a row of `frames.table`.
        frame: of the run; its GPUs tell whose collectives ran.
    """
    if line["extra"].get("engine"):  # the row says what it was made of
        return f"{line['extra']['engine']}{'; queries gathered' if given(line.get('queries')) else ''}"
    owner = {"vllm": "vLLM kernels", "sglang": "SGLang kernels"}.get(line["arm"].split("_")[0], "m3cp kernels")
    form = {"staged": "staged", "one_launch": "one launch", "two_launch": "two launches"}.get(
        given(line.get("form")), ""
    )
    words = [owner, form] if form else [owner]
    exchange = given(line.get("exchange"))
    if exchange == "collective":
        words.append(collectives(frame))
    elif exchange and form == "staged" or exchange and owner != "m3cp kernels":
        words.append("peers' memory")
    if exchange and owner != "m3cp kernels":
        words.append("our glue")
    name = ", ".join(words)
    queries = given(line.get("queries"))
    if queries:
        charged = any("extra_projection" in stage for stage in line["region"])
        name += (
            "; queries gathered"
            if queries == "gathered"
            else f"; queries replicated{'' if charged else ', projection not charged'}"
        )
    if not frames.missing(line.get("threshold_blocks")):
        name += f"; adaptive above {line['threshold_blocks']:.0f} blocks"
    return name


def collectives(frame: Any) -> str:
    """Whose collectives a process group used on this node: NCCL, RCCL or gloo."""
    gpus = next((p.get("gpus") for p in frame["provenance"] if p.get("gpus")), None)
    if not gpus:
        return "gloo"
    return "RCCL" if str(gpus[0].get("arch", "")).startswith("gfx") else "NCCL"


def crossings(comparison: crossover.Comparison) -> list[crossover.BreakEven]:
    """Measured break-evens that lie where keys are read: below that, CP wins as soon as there is anything to save."""
    shape = comparison.pairs["shape"].iloc[0]
    return [a for a in comparison.measured if a.answer == "crosses" and a.value > 1.05 * shape.topk * shape.block_size]


def short(tokens: float) -> str:
    """A token count in two digits: 37.8k is "38k"."""
    if tokens <= 0 or not math.isfinite(tokens):
        return tokens_about(tokens)
    unit = 2**20 if tokens >= 2**20 else 2**10
    scaled = tokens / unit
    digits = max(0, 1 - math.floor(math.log10(scaled)))
    return f"{round(scaled, digits):g}{'M' if unit == 2**20 else 'k'}"


def pays_from(comparison: crossover.Comparison) -> tuple[str, str]:
    """(tokens a step from which CP pays, the same by batch) in words; a step's tokens are those of all its requests."""
    known = crossings(comparison)
    if not known:
        words = {a.answer for a in comparison.measured}
        if not words:
            return "undecided", "no point was measured but behind an evicting read"
        most = int((comparison.pairs["context_tokens"] * comparison.pairs["batch"]).max())
        if words <= {"none in range"}:
            return "never", f"TP is faster at every measured point, up to {short(most)} tokens a step"
        if words <= {"below range", "crosses"}:
            return "always", "CP is faster wherever keys are read"
        return "undecided", "; ".join(a.text for a in comparison.measured)
    sums = [a.value * a.at for a in known]
    low, high = min(sums), max(sums)
    total = short(high) if short(low) == short(high) else f"{short(low)} to {short(high)}"
    each = ", ".join(f"{a.at:.0f} × {short(a.value)}" for a in known)
    never = [f"{a.at:.0f}" for a in comparison.measured if a.answer == "none in range"]
    return total, each + (f"; none in range at batch {', '.join(never)}" if never else "")


def headline(found: Review) -> str:
    """The answer in one sentence: for the reader's traffic where there is one, else for this node."""
    choice = found.choices[0]
    if found.steps and choice.policy:
        answer = judged(found, choice)
        on = {"cp": "Turn context parallelism on", "tp": "Leave context parallelism off"}[answer.path]
        if not answer.steps:
            return f"Undecided for {found.traffic}: all of its {answer.refused} steps lie outside what was measured."
        value, low, high = answer.gain_us
        if answer.refused > answer.steps:
            return f"Undecided for {found.traffic}: {answer.refused} of its {answer.refused + answer.steps} steps lie outside what was measured; over the others CP changes a layer by {-value:+.2f} µs."
        if low < 0 < high:
            return f"For {found.traffic} it makes no difference that was measured: {-value:+.2f} µs a layer (95% {-high:+.2f} to {-low:+.2f})."
        return f"{on} for {found.traffic}: it changes a layer's indexing by {-value:+.2f} µs, {-100 * answer.relative:+.0f}%."
    total, _ = pays_from(choice.comparison)
    if total == "never":
        return "Leave context parallelism off: tensor parallelism is faster at every measured point."
    if total == "always":
        return "Turn context parallelism on: it is faster wherever keys are read."
    if total == "undecided":
        return "Undecided: the measured points do not tell where context parallelism begins to pay."
    return f"Turn context parallelism on where a decode step holds more than about {total.split(' to ')[-1]} tokens of context, all its requests together; leave it off below {total.split(' to ')[0]}."


def judged(found: Review, choice: Choice) -> advice.Static:
    """The static answer of a choice for the review's traffic."""
    first = choice.first
    batches = [step.context_lengths for step in found.steps]
    return advice.static(choice.policy, batches, int(first["world"]), str(first["dtype"]), int(first["query_len"]))


def reference(comparison: crossover.Comparison) -> Any:
    """Pairs at which gains are quoted: for each of `REFERENCE_TOKENS` the measured pair with nearest tokens a step.

    Pairs that read no key, or were timed behind an evicting read, are not quoted.
    """
    read = comparison.pairs[comparison.pairs["read"] & ~comparison.pairs["evicted"]]
    tokens = read["context_tokens"] * read["batch"]
    nearest = [(np.log2(tokens / want).abs() + 0.01 * np.log2(read["batch"])).idxmin() for want in REFERENCE_TOKENS]
    return read.loc[list(dict.fromkeys(nearest))]


def answer(found: Review) -> str:
    """The top of the page: the verdict, for which engine, what it gives, how sure, in HTML."""
    choice = found.choices[0]
    _, each = pays_from(choice.comparison)
    lines = [f"<p class='verdict'>{html.escape(headline(found))}</p>"]
    facts = [
        (
            "For",
            html.escape(
                f"{choice.name}, on {found.where}, {found.run.source}. {engines_text(found)} {switches_text(found)}"
            ),
        ),
        ("Break-even", html.escape(f"requests × context: {each} (measured, between neighbouring points)")),
        ("Gives", html.escape(gives(found))),
        ("How sure", sure(found)),
    ]
    lines += ["<dl>", *(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in facts), "</dl>"]
    return f"<div class='answer'>{''.join(lines)}</div>"


def engines_text(found: Review) -> str:
    """Which engines' kernels were measured here, in words."""
    engines = sorted({c.name.split(" kernels")[0] for c in found.choices if not c.name.startswith("m3cp")})
    if engines:
        return f"{' and '.join(engines)} kernels were measured in the same run and stand in the table below."
    return "No engine's own kernels have rows in this run: the figures are of m3cp's kernels, which an engine would have to call."


def refusals(found: Review) -> list[tuple[engines.Switch, str]]:
    """Each engine's switch, and why it has no CP for this node ("" where it has)."""
    first = found.choices[0].first
    vendor = engines.vendor_of(str(first["node"]))
    why = [switch.refuses(vendor, int(first["world"]), str(first["dtype"])) for switch in engines.SWITCHES]
    if collectives(found.run.frame) == "gloo":  # a run on CPUs
        why = ["" if switch.vendor == "any" else "GPUs only" for switch in engines.SWITCHES]
    return list(zip(engines.SWITCHES, why, strict=True))


def switches_text(found: Review) -> str:
    """Which engines can turn CP on for this node at all, in a sentence."""
    can = [switch.engine for switch, why in refusals(found) if not why]
    cannot: dict[str, list[str]] = {}
    for switch, why in refusals(found):
        if why:
            cannot.setdefault(why, []).append(switch.engine.split(",")[0])
    words = "; ".join(f"{', '.join(dict.fromkeys(names))} refuse it ({why})" for why, names in cannot.items())
    return f"CP can be turned on here in {', '.join(can) or 'no engine'}{f'; {words}' if words else ''}."


def switch_table(found: Review) -> str:
    """How each engine turns CP on, the log line that proves it, and whether it can here."""
    rows = [
        [s.engine, f"$ {s.on}", f"$ {s.proof}" if s.vendor != "any" else s.proof, why or "yes"]
        for s, why in refusals(found)
    ]
    note = f"Can here: for {found.where}. Engines' switches were read in their sources, none was run here; one without its log line has not taken effect."
    return table(["engine", "turn it on", "proof", "can here"], rows, note)


def gives(found: Review) -> str:
    """What CP changes: over the traffic, or at the largest reference point; a layer, and a token of the whole model."""
    choice = found.choices[0]
    if found.steps and choice.policy:
        found_static = judged(found, choice)
        value, low, high = (v * SPARSE_LAYERS / 1000 for v in found_static.gain_us)
        return (
            f"{-value:+.3f} ms a token over {SPARSE_LAYERS} sparse layers (95% {-high:+.3f} to {-low:+.3f}; modelled from the rows, "
            f"no speculation, no reuse); {found_static.steps} steps judged, {found_static.refused} outside what was measured"
        )
    words = []
    for _, pair in reference(choice.comparison).iterrows():
        ms = pair["delta_us"] * SPARSE_LAYERS / 1000
        words.append(f"{ms:+.2f} ms at {pair['batch']} × {tokens_about(pair['context_tokens'])}")
    return f"change of a token's time over {SPARSE_LAYERS} sparse layers: {', '.join(words)} (measured a layer, times {SPARSE_LAYERS})"


def sure(found: Review) -> str:
    """How much the rows and the model can be believed, in one sentence each."""
    pairs = found.main.pairs
    words = pairs["verdict"].value_counts()
    known = crossings(found.main)
    text = (
        f"of {len(pairs)} measured points CP is faster at {words.get('FASTER', 0)}, slower at {words.get('SLOWER', 0)}, "
        f"and {words.get('SAME', 0) + words.get('UNDECIDED', 0)} are within 2% or undecided at 95%"
    )
    if found.steps and found.choices[0].policy:
        text = f"{judged(found, found.choices[0]).confidence:.0%} that this is the faster path over the traffic; {text}"
    if known:
        widest = max((a.high - a.low) / 2 / a.value for a in known)
        within = "rounds, processes, sittings" if pairs["processes"].max() > 1 else "rounds within one process"
        text += f"; measured break-even is known to ±{max(1.0, 100 * widest):.0f}% ({within})"
    aims = [target for target in found.aims if target.met is not None]
    text += f"; the cost model meets {sum(t.met for t in aims)} of {len(aims)} of its aims"
    open_ = sum(target.undecided for target in found.aims)
    text += f" ({open_} more {heldout.UNDECIDED})" if open_ else ""
    unsteady = int(pairs["unsteady"].sum())
    if unsteady:
        text += (
            f"; <b>{unsteady} of {len(pairs)} points are marked unsteady</b> (the floor moved by over 3% around them)"
        )
    repeated = int((pairs["processes"] > 1).sum())
    text += f"; {repeated or 'no'} point{'s were' if repeated > 1 else ' was'} repeated in a fresh process"
    return text + "."


def engine_table(found: Review) -> str:
    """Every way to turn CP on that was measured here: where it pays, what it gives at one point, and over the traffic."""
    shared = [
        set(zip(c.comparison.pairs["context_tokens"], c.comparison.pairs["batch"], strict=True)) for c in found.choices
    ]
    common = set.intersection(*shared)
    at = [p for _, p in reference(found.main).iterrows() if (p["context_tokens"], p["batch"]) in common]
    at = at[:1] + at[1:][-3:-1]
    head = [
        "CP by",
        "pays from, tokens a step",
        *(f"{p['batch']} × {tokens_about(p['context_tokens'])}: TP → CP, µs" for p in at),
    ]
    head += ["over the traffic"] if found.steps else []
    rows = []
    for choice in found.choices:
        cells = [choice.name, pays_from(choice.comparison)[0]]
        for point in at:
            mine = choice.comparison.pairs
            pair = mine[(mine["context_tokens"] == point["context_tokens"]) & (mine["batch"] == point["batch"])].iloc[0]
            cells.append(f"{pair['tp_us']:.1f} → {pair['cp_us']:.1f}  ({plots.cell_words(pair)})")
        if found.steps:
            cells.append(judged(found, choice).text.split(":")[0] if choice.policy else f"no policy: {choice.why}")
        rows.append(cells)
    return table(head, rows)


def line_table(lines: Sequence[break_even_lines.MeasuredLine]) -> str:
    """The measured break-even lines, a column a line, a row a batch."""
    head, rows, _ = break_even_lines.line_table(lines)
    return table(head, rows)


def gain_table(found: Review) -> str:
    """At the reference points: both arms, measured, beside floor and prediction, and what the layer's gain is a token."""
    tp, cp = found.main.tp, found.main.cp
    floors = floor_of(found.main)
    head = ["requests × context", "page read TP / CP", "TP", "CP", "gain, measured (95%)", "gain, predicted", "a token"]
    rows = []
    for _, pair in reference(found.main).iterrows():
        where = (int(pair["context_tokens"]), int(pair["batch"]))
        floor = floors.get(where)
        guess = tp.us(tp.point(*where)) - cp.us(cp.point(*where))
        rows.append([
            f"{where[1]} × {tokens_about(where[0])}", f"{floor[0]:.1f} / {floor[1]:.1f}" if floor else "not measured",
            f"{pair['tp_us']:.1f}", f"{pair['cp_us']:.1f}", f"{-pair['delta_us']:+.1f} ({-pair['delta_high']:+.1f} to {-pair['delta_low']:+.1f})",
            f"{guess:+.1f}", f"{pair['delta_us'] * SPARSE_LAYERS / 1000:+.2f} ms",
        ])  # fmt: skip
    return table(
        head,
        rows,
        "Microseconds a layer, slowest rank. Page read: the measured floor. Predicted: the cost model, fitted to these rows.",
    )


def floor_of(comparison: crossover.Comparison) -> dict[tuple[int, int], tuple[float, float]]:
    """{(context, batch): (TP's page read, CP's page read)} in microseconds, where both were measured."""
    tp, cp = crossover.arm_frames(comparison)
    found = []
    for rows in (tp, cp):
        rows = rows.dropna(subset=["page_read_us"])
        found.append(
            {
                (int(c), int(b)): float(us)
                for c, b, us in zip(rows["context_tokens"], rows["batch"], rows["page_read_us"], strict=True)
            }
        )
    return {where: (found[0][where], found[1][where]) for where in found[0] if where in found[1]}


def aims_table(found: Review) -> str:
    """What was aimed at for the cost model, what it came to, and whether that is enough."""
    rows = [
        [t.name, f"{t.value:.3g}", f"{t.allowed:.3g}", t.word, t.note]
        for t in found.aims
    ]
    note = (
        "Where an aim is missed, believe the break-even between measured neighbours, not the model's. Undecided by the measurement: its own "
        "95% interval is wider than the error allowed and holds the modelled value."
    )
    return table(["aim", "came to", "allowed", "", ""], rows, note)


def provenance(found: Review) -> str:
    """Where every figure comes from, as a table."""
    ok = frames.timed(found.run.frame)
    facts = [p for p in ok["provenance"] if p]
    first = facts[0] if facts else {}
    gpus = first.get("gpus") or []
    checks = [c for c in ok["check"] if c]
    compared, wrong = sum(c.get("rows", 0) for c in checks), sum(c.get("mismatches", 0) for c in checks)
    times = sorted(p["time_utc"] for p in facts if p.get("time_utc"))
    versions = first.get("versions") or {}
    rows = [
        ["run", f"{found.run.name}, {found.run.source}: {found.run.summary.split(': ', 2)[-1]}"],
        [
            "machine",
            f"{ok['node'].iloc[0]}; {first.get('cpu_model', 'CPU unknown')}; driver {first.get('driver') or 'unknown'}",
        ],
        ["GPUs", ", ".join(f"{g['name']} ({g.get('arch', 'architecture unknown')})" for g in gpus) or "none"],
        [
            "software",
            ", ".join(f"{n} {versions[n]}" for n in ("python", "torch", "triton", "nccl", "rccl") if versions.get(n))
            or "unknown",
        ],
        [
            "variables",
            ", ".join(f"{k}={v}" for k, v in (first.get("environment") or {}).items()) or "none that steer collectives",
        ],
        ["code", f"{ok['code_hash'].iloc[0]} (hash of the measuring path), commit {found.run.commit[:12]}"],
        ["measured", f"{times[0]} to {times[-1]}" if times else "time unknown"],
        ["checks", f"{compared:,} rows of ids compared with the reference, {wrong} wrong"],
        [
            "cache",
            f"{', '.join(sorted(set(ok['cache_state'])))}: bytes touched before a page comes again, over the last-level cache",
        ],
        ["command", str(first.get("command", "unknown"))],
    ]
    if found.left_out:
        rows.append(["left out", f"{found.left_out} rows of other machines or code versions in the same run"])
    return table(["", ""], rows)


def limits() -> str:
    """What this page does not say, as an HTML list."""
    return "<ul>" + "".join(f"<li>{line.format(layers=SPARSE_LAYERS)}</li>" for line in LIMITS) + "</ul>"


def recipe(found: Review) -> str:
    """The commands that make this page again, from the rows and from the machine."""
    name = found.run.name
    traffic = f" --traffic {found.traffic}" if found.traffic else ""
    lines = [
        ("this page again, from the rows", f"m3cp report --node {name}{traffic}"),
        ("these figures' numbers and the model's errors", f"m3cp fit {name} --errors"),
        ("the policy file an engine loads", f"m3cp policy {name}{traffic}"),
        ("measure your own node", "m3cp sweep data/grids/node.json --out data/runs/mine"),
        ("give it a name, and its own page", "m3cp record mine --as my-node && m3cp report --node my-node"),
    ]
    return table(["", ""], [[what, f"$ {command}"] for what, command in lines])


def served_table(found: Review) -> str:
    """Published serving changes on MI355X beside what this node's model gives at the same sizes: two machines, labelled."""
    published = serving.against_published(*serving.published_models())
    tp, cp = found.main.tp, found.main.cp
    rows = []
    for _, line in published.iterrows():
        context, concurrency = int(line["context_tokens"]), int(line["concurrency"])
        agentic = line["source"].startswith("AgentX")
        shares = workload.DECODING_SHARE if agentic else ()
        spread = [serving.batch_distribution(concurrency, s) for s in shares] or [[(concurrency, 1.0)]]
        changes = [serving.tpot_change(tp, cp, context, batches) for batches in spread]
        ours = f"{np.mean([c.ms for c in changes]):+.2f} ms ({min(c.low_ms for c in changes):+.2f} to {max(c.high_ms for c in changes):+.2f})"
        rows.append(
            [
                line["source"],
                f"{concurrency} × {short(context)}",
                str(line["measured"]),
                f"{line['predicted_ms']:+.2f} ms",
                ours,
            ]
        )
    head = [
        "served, published",
        "concurrency × context",
        "published change of time per token",
        "explained by published µs a layer",
        "this node's model",
    ]
    note = (
        "Published: vLLM on four MI355X or MI350X (data/published). Third column from SGLang's published indexer times, P = 4, fp8, warm. "
        f"Last column: {found.where}, modelled; another machine, another P. AgentX: 22 to 41% of requests decode at once."
    )
    return table(head, rows, note)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], note: str = "") -> str:
    """An HTML table; everything is escaped, a cell that begins with "$ " is a command."""

    def cell(text: str) -> str:
        safe = html.escape(str(text))
        narrow = " class='n'" if len(safe) <= 32 else ""  # short cells stay on one line
        return f"<td><code>{safe[2:]}</code></td>" if safe.startswith("$ ") else f"<td{narrow}>{safe}</td>"

    top = f"<thead><tr>{''.join(f'<th>{html.escape(h)}</th>' for h in head)}</tr></thead>" if any(head) else ""
    body = "".join(f"<tr>{''.join(cell(c) for c in row)}</tr>" for row in rows)
    foot = f"<p class='note'>{html.escape(note)}</p>" if note else ""
    return f"<div class='table'><table>{top}<tbody>{body}</tbody></table></div>{foot}"
