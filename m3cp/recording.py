"""A run that a user measured becomes a named node under data/measured, which figures, policy and report can show.

What is recorded is looked at first: one machine, one code version, nothing that contradicts itself, no wrong answer.
Rows are copied as they are, never edited.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from m3cp import records
from m3cp.frames import ROOT, find_run
from m3cp.shapes import require

NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
COLD_OVER_LLC = 2.0  # a cold row touches more than this many last-level caches, or evicts between calls
PEAK_SLACK = 1.05  # over the data sheet's bandwidth: more than this was not memory
KEPT_BESIDE = ("node_check.json",)  # measured too; policies and figures are made again from the rows


def objections(rows: Sequence[records.Row]) -> list[str]:
    """Why these rows can't be one node's record, each in words; empty when they can.

    Args:
        rows: of one run, in order.
    """
    ok, ran = [row for row in rows if row.status == "ok"], [row for row in rows if row.status != "skipped"]  # what was skipped, no code ran
    found = [] if ok else ["no row has a time"]
    for what, values in (
        ("machines", [row.node for row in ran]),
        ("code versions (code_hash)", [row.provenance.get("code_hash", "unknown") for row in ran]),
    ):
        if len(set(values)) > 1:
            counts = ", ".join(f"{value} ({n} rows)" for value, n in Counter(values).items())
            found.append(f"rows of several {what}: {counts}; sweep each into a run of its own (`m3cp sweep --out`)")
    unknown = sum(row.provenance.get("code_hash", "unknown") == "unknown" for row in ran)
    if unknown:
        found.append(f"{unknown} rows do not say which code measured them (provenance.code_hash)")
    dirty = sum(row.provenance.get("dirty") is True and not _as_committed(row) for row in rows)
    if dirty:
        found.append(f"{dirty} rows were measured with uncommitted changes (dirty); commit, then sweep again")
    wrong = [row for row in rows if row.check.get("passed") is False]
    if wrong:
        found.append(f"{len(wrong)} rows failed their check of the ids, first {wrong[0].point.label}: {wrong[0].error}")
    return found + _summed(f"{row.point.label}: {fault}" for row in ok for fault in _faults(row))


def _as_committed(row: records.Row) -> bool:
    """Whether the commit that a row names holds the very code that measured it: then other files were the changed ones."""
    measured = row.provenance.get("code_hash")
    return measured is not None and _committed_hash(row.provenance.get("commit", "")) == measured


_committed_hash = functools.cache(records.committed_hash)


def _faults(row: records.Row) -> Iterable[str]:
    """What in one timed row contradicts itself, in words."""
    samples = row.samples_us
    if not all(math.isfinite(v) and v > 0 for v in samples):
        yield "a sample that is no positive number of microseconds"
        return
    if len(row.rank_samples_us) != row.ranks or any(len(rank) != len(samples) for rank in row.rank_samples_us):
        yield f"samples of {len(row.rank_samples_us)} ranks, the row says ranks={row.ranks} and {len(samples)} rounds"
    elif any(
        abs(max(each) - s) > 1e-6 * s for each, s in zip(zip(*row.rank_samples_us, strict=True), samples, strict=True)
    ):
        yield "a sample that is not the slowest rank's"
    if row.cache_state == "cold" and row.bytes_read and row.evict_us is None:
        over = row.footprint_over_llc
        if over is None or over < COLD_OVER_LLC:
            yield f"called cold, but its footprint is {over} last-level caches (more than {COLD_OVER_LLC:g}, or an evicting read)"
    peak = row.extra.get("datasheet_gbs")
    if peak and row.cache_state == "cold" and row.distinct_bytes_read / row.median_us / 1e3 > PEAK_SLACK * peak:
        rate = row.distinct_bytes_read / row.median_us / 1e3
        yield f"reads at {rate:.0f} GB/s, the memory's data sheet says {peak:.0f}"


def _summed(faults: Iterable[str], shown: int = 3) -> list[str]:
    """The first few of them, and how many more there are."""
    every = list(faults)
    return every[:shown] + ([f"and {len(every) - shown} more rows like these"] if len(every) > shown else [])


def record(run: str, name: str, overwrite: bool = False, root: Path | None = None) -> list[str]:
    """Copy a run's rows to `data/measured/<name>`; returns the lines to print.

    Args:
        run: a run's folder or name, as `frames.find_run` takes it; "" is the latest local one.
        name: of the node: small letters, digits, dot, dash and underscore, such as "mi355x4".
        overwrite: replace what is recorded under that name. Its policy files, made from the old rows, go too.
        root: of the repository.

    Raises:
        FileNotFoundError: no such run.
        ValueError: a name that can't be a folder's, one that is taken, or rows that are no record, with every reason.
    """
    require("--as", name, bool(NAME.fullmatch(name)), "small letters, digits, '.', '-' and '_', such as 'mi355x4'")
    root = root or ROOT
    source, target = find_run(run, root), root / "data" / "measured" / name
    if source.resolve() == target.resolve():
        raise ValueError(f"run={run!r}: {name} is this recorded node itself")
    rows = records.load(source)
    found = objections(rows)
    if found:
        raise ValueError(f"{source.name} is not recorded:\n" + "\n".join(f"  - {reason}" for reason in found))
    if (target / records.ROWS_FILE).exists() and not overwrite:
        old = records.load(target)
        raise ValueError(
            f"--as={name!r}: {len(old)} rows of {old[0].node if old else 'nothing'} are recorded there; "
            "another name, or --overwrite to replace them"
        )
    stale = sorted(target.glob("policy_*.json"))
    target.mkdir(parents=True, exist_ok=True)
    _copy(records.rows_files(source), target / records.ROWS_FILE)
    for file in KEPT_BESIDE:
        _copy([source / file], target / file)
    for path in stale:
        path.unlink()
    return _told(rows, name, target, stale)


def _copy(sources: Sequence[Path], target: Path) -> None:
    """Whole lines of the files in one, put in place at once; where there is none of them, none stays from before."""
    found = [path.read_bytes() for path in sources if path.exists()]
    if not found:
        target.unlink(missing_ok=True)
        return
    part = target.with_name(target.name + ".part")
    part.write_bytes(b"".join(data[: data.rfind(b"\n") + 1] if target.suffix == ".jsonl" else data for data in found))
    os.replace(part, target)


def _told(rows: Sequence[records.Row], name: str, target: Path, stale: Sequence[Path]) -> list[str]:
    """What was recorded, what its reader should know, and what to type next."""
    counts = Counter(row.status for row in rows)
    ok = [row for row in rows if row.status == "ok"]
    worlds = sorted({row.point.world for row in ok if row.point.arm.endswith("cp")})
    lines = [
        f"{name}: {rows[0].node}, code {ok[0].provenance['code_hash']}, {len(rows)} rows "
        f"({', '.join(f'{n} {status}' for status, n in counts.items())}), in {target}"
    ]
    lines.append(
        f"  CP measured at P = {', '.join(map(str, worlds))}" if worlds else "  no CP row: it can show no break-even"
    )
    unsteady = sum(row.unsteady for row in ok)
    if unsteady:
        lines.append(
            f"  {unsteady} of {len(ok)} timed rows are unsteady: the page-read probe drifted by over 3% around them"
        )
    if any(row.provenance.get("dirty") is None for row in ok):
        lines.append("  whether the code had uncommitted changes is not known (measured without git)")
    lines += [f"  removed {path.name}, made from the rows that were here" for path in stale]
    return lines + [f"  next: m3cp report --node {name}, m3cp policy {name}, m3cp fit {name}"]
