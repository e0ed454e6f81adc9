"""What the node kit shows: figures from whatever rows there are, and one page of all steps. Neither torch nor triton."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from m3cp import records, trust
from m3cp.kit_state import CUT, DONE, FACTS_FILE, FAILED, LEFT_OUT, PUBLISHED, STATE_FILE, LeftOut, State, read, write

PAIR_COLUMNS = {
    "arm": "arm", "form": "form", "exchange": "exchange", "queries": "queries", "dtype": "dtype", "context_tokens": "context", "batch": "batch", "mix": "mix",
    "cache_state": "cache", "tp_us": "TP µs", "cp_us": "CP µs", "ratio": "TP / CP", "ratio_low": "95%", "ratio_high": "", "verdict": "CP is",
}  # fmt: skip
STEP_COLOURS = {DONE: "#1a7f37", FAILED: "#b3261e", CUT: "#8a6d00", LEFT_OUT: "#6b6b6b"}


def analyse(run: Path) -> list[str]:
    """Draw the node check, the maps and the curves that the run's rows allow; say break-even and the model's errors.

    Raises:
        LeftOut: nothing was measured yet.
    """
    from m3cp import plots

    stamp = {"run": run.name, "commit": "unknown", "folder": run / "figures"}
    lines = _node_figures(run, stamp, plots)
    for folder, name in ((run, ""), (run / PUBLISHED, "published shapes: ")):
        if (folder / records.ROWS_FILE).exists():
            lines += [f"{name}{line}" for line in _rows(folder, run)]
    if not lines:
        raise LeftOut("nothing was measured yet")
    return lines + [f"{len(sorted((run / 'figures').glob('*.svg')))} figures"]


def _rows(folder: Path, run: Path) -> list[str]:
    """Maps, curves, pairs and errors of one folder's rows; `run` gets the figures and the table."""
    from m3cp import crossover, frames, heldout, plots
    from m3cp import fit as fitting

    here = frames.load_run(str(folder))
    prefix = "" if folder == run else f"{folder.name}_"
    stamp = {"run": run.name, "commit": here.commit, "folder": run / "figures"}
    found = crossover.comparisons(here.frame, fitting.ALL_TERMS)
    lines, answers = [], []
    for number, grid in enumerate(crossover.grids(found)):
        first = grid.pairs.iloc[0]
        name = f"{plots.arm_name({k: first[k] for k in crossover.VARIANT})}, P = {first['world']}, {first['dtype']}, {first['cache_state']}"
        title = f"Where CP beats TP{', published shapes' if prefix else ''}"
        plots.save(plots.maps([plots.panel(grid, here.title)], title), f"{prefix}map_{number}", **stamp)
        lines += [f"{name}: {answer.text}" for answer in (*grid.measured, *grid.model)]
        answers.append({"name": name, "texts": [a.text for a in grid.measured], "short": {f"{a.at:.0f}": _short(a) for a in grid.measured}})
    write(folder / "answers.json", answers)
    for name, rows, models in crossover.curve_sets(here.frame):
        plots.save(plots.curves(rows, models, here.source), f"{prefix}curves_{name}", **stamp)
    if found:
        write(folder / "pairs.json", json.loads(crossover.pair_table(found)[list(PAIR_COLUMNS)].to_json(orient="values")))
    try:
        lines += heldout.markdown(here.frame).splitlines()
    except ValueError as error:  # too few rows of any arm to leave some out
        lines.append(f"no errors of the model: {error}")
    return lines


def _short(answer: Any) -> str:
    """A break-even for a cell of a table, tokens a request."""
    words = {"none in range": "TP faster throughout", "below range": "CP faster throughout", "undecided": "undecided"}
    if answer.value is None or answer.answer == "undecided":
        return words[answer.answer]
    from m3cp import crossover

    return f"{crossover.tokens_about(answer.value)} ({answer.band})"


def _node_figures(run: Path, stamp: dict[str, Any], plots: Any) -> list[str]:
    """Figures of the footprint curve and of the collectives, where those steps left their results."""
    lines = []
    for path in sorted(run.glob("node_check_*.json")):
        found = read(path)
        stamp = {**stamp, "commit": found["provenance"]["commit"]}
        if found["curve"]:
            curve = plots.bandwidth_curve(found["curve"], found["node"], found["last_level_bytes"], found["datasheet_gbs"])
            lines.append(str(plots.save(curve, "node_bandwidth", **stamp)[0].name))
        if found["collectives"]:
            lines.append(str(plots.save(plots.collective_latency(found["collectives"], found["node"]), "node_collectives", **stamp)[0].name))
    return lines


def page(run: Path, titles: Mapping[str, str]) -> Path:
    """Write `index.html` into the run's folder: self-contained, so that it can be mailed alone.

    Args:
        run: the run's folder.
        titles: of the steps to show, by name and in their order.
    """
    from m3cp.report import STYLE

    state = State.of(read(run / STATE_FILE))
    facts = read(run / FACTS_FILE) or {"node": "an unknown machine", "ranks": 0}
    counts = {status: sum(r.status == status for r in state.steps.values()) for status in STEP_COLOURS}
    parts = [f"<h1>{_e(state.name)}: {_e(facts['node'])}</h1>", f"<div class='answer'><p class='verdict'>{_e(_verdict(run, state))}</p></div>"]
    seconds = sum(r.seconds for r in state.steps.values())
    stretches = f"{state.stretches} stretch{'es' if state.stretches != 1 else ''}"
    parts.append(
        f"<p>{counts[DONE]} steps done, {counts[FAILED]} failed, {counts[LEFT_OUT]} left out, {counts[CUT]} not finished; "
        f"{seconds / 60:.1f} minutes in {stretches}; {facts['ranks']} ranks.</p>"
    )
    parts.append(f"<p>{_e(_provenance(run, state))}</p>")
    parts += ["<h2>Steps, in rising risk</h2>", _steps(state, titles)]
    folders = (("Targets' grid", run), ("Published shapes", run / PUBLISHED))
    parts += _section("Break-even, measured", [_note(_break_even(folders), "Tokens a request from which CP is not slower than TP of the same kernels, in CP's form or, where TP was not measured in it, in TP's fastest; 95% in brackets. Replicated queries are not charged for projecting the other ranks' heads.")])
    beside = [(name, _beside(folder)) for name, folder in folders]
    tables = [_note(table, f"{name}: µs a call, median of the slowest rank; ids checked.") for name, table in beside]
    parts += _section("Measured, CP beside TP", tables)
    parts += _section("Forms that wait for peers", [_table(("form", "verdict"), [(v.form, v.text) for v in trust.load(run / trust.FILE)])])
    parts += _section("Engines and AITER", [_aiter([read(run / name) for name in ("aiter.json", "aiter_cp.json")])])
    parts += _section("Words between GPUs", [_pairs(read(run / "pingpong.json"))])
    parts += _section("What a graph's node costs", [_gaps(run)])
    parts += _section("What compilers made", [_resources(read(run / "resources.json"))])
    figures = sorted((run / "figures").glob("*.svg"))
    parts += _section("Figures", [_figure(path) for path in figures])
    doctor = run / "doctor.txt"
    parts += _section("Doctor", [f"<pre>{_e(doctor.read_text())}</pre>" if doctor.exists() else ""])
    style = STYLE + "td, th { padding-right: .55rem; } .table tbody td:first-child { min-width: 0; } pre { font-size: .78rem; overflow-x: auto; } .status { font-weight: 650; }"
    head = "<meta charset='utf-8'><meta name='viewport' content='width=device-width, initial-scale=1'>"
    body = "\n".join(parts)
    out = run / "index.html"
    out.write_text(f"<!doctype html>\n<html lang='en'><head>{head}<title>{_e(state.name)}</title><style>{style}</style></head>\n<body>\n{body}\n</body></html>\n")
    return out


def _e(value: Any) -> str:
    return html.escape(str(value))


def _section(title: str, parts: Sequence[str]) -> list[str]:
    """A heading and what stands under it; nothing where there is nothing."""
    return [f"<h2>{_e(title)}</h2>", *parts] if any(parts) else []


def _note(table: str, words: str) -> str:
    """A line above a table; nothing without one."""
    return f"<p>{_e(words)}</p>{table}" if table else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    rows = list(rows)
    if not rows:
        return ""
    cells = "".join("<tr>" + "".join(f"<td>{_e(value)}</td>" for value in row) + "</tr>" for row in rows)
    names = "".join(f"<th>{_e(name)}</th>" for name in head)
    return f"<div class='table'><table><thead><tr>{names}</tr></thead><tbody>{cells}</tbody></table></div>"


def _verdict(run: Path, state: State) -> str:
    """The first thing a reader wants: is there an answer, and what stands in its way."""
    refused = [v.text for v in trust.load(run / trust.FILE) if not v.trusted]
    measured = read(run / "answers.json") or []
    failed = [name for name, record in state.steps.items() if record.status == FAILED]
    words = [f"{a['name']}: {'; '.join(a['texts'])}." for a in measured[:1]] or ["No CP row meets a TP row yet: no break-even."]
    words += refused
    words += [f"Failed: {', '.join(failed)}; the rest is usable."] if failed else []
    return " ".join(words)


def _provenance(run: Path, state: State) -> str:
    """Which code, on what, when: what a figure of this page is worth without its archive."""
    known = read(run / "provenance.json") or {}
    versions = known.get("versions", {})
    named = [f"{name} {versions[name]}" for name in ("python", "torch", "triton", "nccl", "rccl") if name in versions]
    named += [f"driver {known['driver']}"] if known.get("driver") else []
    return f"Code {state.code_hash}, commit {known.get('commit') or state.commit or 'unknown'}; {', '.join(named) or 'versions unknown'}; begun {known.get('time_utc', 'at an unknown time')}."


def _steps(state: State, titles: Mapping[str, str]) -> str:
    rows = []
    for name, title in titles.items():
        record = state.steps.get(name)
        if record is None or name == "page":
            continue
        colour = STEP_COLOURS.get(record.status, "#1d1d1d")
        said = "\n".join(record.why.splitlines()[1:] + record.lines).strip()
        more = f"<details><summary>what it said</summary><pre>{_e(said)}</pre></details>" if "\n" in said else ""
        rows.append(
            f"<tr><td>{_e(title)}</td><td class='status' style='color:{colour}'>{_e(record.status)}</td>"
            f"<td class='n'>{record.seconds:.0f} s</td><td>{_e(record.words)}{more}<div class='note'>logs/{_e(name)}.log</div></td></tr>"
        )
    head = "<tr><th>step</th><th>status</th><th>took</th><th>in words</th></tr>"
    return f"<div class='table wide'><table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table></div>"


def _break_even(folders: Sequence[tuple[str, Path]]) -> str:
    """A line a comparison, a column a batch."""
    found = [(name, answer) for name, folder in folders for answer in read(folder / "answers.json") or []]
    batches = sorted({int(at) for _, answer in found for at in answer["short"]})
    rows = [(answer["name"], name, *(answer["short"].get(str(b), "") for b in batches)) for name, answer in found]
    return _table(("CP, against TP", "rows", *(f"batch {b}" for b in batches)), rows)


def _beside(folder: Path) -> str:
    """The measured pairs of a folder, times in microseconds."""
    low = list(PAIR_COLUMNS).index("ratio_low")
    rows = []
    for row in read(folder / "pairs.json") or []:
        cells = ["" if v is None else (f"{v:,.0f}" if v >= 1000 else f"{v:.3g}") if isinstance(v, float) else v for v in row]
        rows.append([*cells[:low], f"{cells[low]} to {cells[low + 1]}", *cells[low + 2 :]])
    names = list(PAIR_COLUMNS.values())
    return _table([*names[: low + 1], *names[low + 2 :]], rows)


def _aiter(found: Sequence[dict[str, Any] | None]) -> str:
    arms = [a for one in found if one for a in one["arms"]]
    rows = [(a["arm"], a["context_tokens"], a["batch"], a["world"], f"{a['us']:.1f}", a["label"]) for a in arms]
    return _table(("arm", "context", "batch", "P", "µs, warm", "what it is"), rows)


def _pairs(found: dict[str, Any] | None) -> str:
    rows = [(f"{p['a']} – {p['b']}", f"{p['turn_us']:.2f}", p["memory"], p["grain"] or "not told") for p in (found or {"pairs": []})["pairs"]]
    return _table(("GPUs", "µs there and back, measured", "memory", "grain"), rows)


def _gaps(run: Path) -> str:
    gaps = [g for path in sorted(run.glob("node_check_*.json")) for g in read(path)["gaps"]]
    return _table(("node", "P", "µs a node, measured"), [(g["node"], g["world"], f"{g['us']:.2f}") for g in gaps])


def _resources(found: dict[str, Any] | None) -> str:
    if not found:
        return ""
    amd = found["target"].startswith("gfx")
    names = ("VGPRs", "LDS bytes", "programs a CU", "waves a CU") if amd else ("registers", "shared bytes", "programs an SM", "warps an SM")
    rows = [
        (k["kernel"], k["registers"], k["shared_bytes"], k["programs"], k["programs"] * k["warps"], k["spills"], k["scalar_spills"])
        for k in found["kernels"]
    ]
    return _table((f"{found['target']}: kernel", *names, "spills, bytes and registers", "SGPRs kept in lanes"), rows)


def _figure(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f"<figure><img src='data:image/svg+xml;base64,{data}' alt='{_e(path.stem)}'><figcaption>figures/{_e(path.name)}</figcaption></figure>"
