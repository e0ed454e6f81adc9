"""Which forms of the kernels a node is trusted with: those that passed the stress check there, with this very code.

The forms whose programs wait for other programs (two_launch, one_launch) are checked for STRESS_S seconds before the
first figure of theirs on a node, GPU count and code version that have not been seen. What was found stands in
`trust.json` beside the run and in the user's cache; a form that failed is refused in words until the code changes.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from m3cp import compiled, records, watchdog
from m3cp.shapes import Point, require

FORMS = ("two_launch", "one_launch")  # in rising risk
STRESS_S = 30.0
SET_UP_S = 150.0  # beyond the stress itself: starting ranks, compiling, capturing, the reference's answers
FILE = "trust.json"


@dataclass(frozen=True)
class Verdict:
    """What the stress check of a form said on a node.

    Args:
        node: the hardware's name as rows have it, such as "4x AMD Instinct MI355X".
        ranks: processes that exchanged; a verdict holds for this many and fewer.
        launches: calls a rank made, each of them compared; 0 where it did not come so far.
        why: in words, when it is not trusted.
    """

    form: str
    trusted: bool
    node: str
    ranks: int
    code_hash: str
    launches: int = 0
    why: str = ""
    time_utc: str = ""

    @property
    def text(self) -> str:
        """For people: what holds, and where it comes from."""
        where = f"on {self.node}, {self.ranks} ranks, code {self.code_hash}"
        if self.trusted:
            return f"form {self.form!r} is trusted {where}: {self.launches:,} launches a rank, every id right"
        return f"form {self.form!r} is refused {where}: its stress check failed: {self.why}"


class TooShort(Exception):
    """A stress check whose time was up before it came to all legs, and that found nothing wrong: no verdict, so it is made again."""


def user_file() -> Path:
    """Where this user's verdicts stand."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "m3cp" / FILE


def load(path: Path) -> list[Verdict]:
    """Verdicts of a file; [] where there is none or it can't be read: then a check is simply made again."""
    try:
        return [Verdict(**values) for values in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError):
        return []


def known(form: str, node: str, ranks: int, run: Path) -> Verdict | None:
    """The newest verdict that holds here; a refusal holds for any number of ranks."""
    code = records.code_hash()
    found = [v for path in (user_file(), run / FILE) for v in load(path)]
    mine = [v for v in found if (v.form, v.node, v.code_hash) == (form, node, code) and (v.ranks >= ranks or not v.trusted)]
    return max(mine, key=lambda v: v.time_utc, default=None)


def record(verdict: Verdict, run: Path) -> None:
    """Keep a verdict beside the run and for this user; a cache that can't be written is done without."""
    _add(run / FILE, verdict)
    with contextlib.suppress(OSError):
        _add(user_file(), verdict)


def _add(path: Path, verdict: Verdict) -> None:
    kept = [v for v in load(path) if (v.form, v.node, v.ranks, v.code_hash) != (verdict.form, verdict.node, verdict.ranks, verdict.code_hash)]
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=FILE)
    with open(handle, "w") as file:
        json.dump([asdict(v) for v in (*kept, verdict)], file, indent=1)
    os.replace(name, path)


def say(form: str, node: str, ranks: int, run: Path, *, trusted: bool, launches: int = 0, why: str = "") -> Verdict:
    """Make a verdict of now and keep it."""
    at = datetime.now(UTC).isoformat(timespec="microseconds")
    verdict = Verdict(form, trusted, node, ranks, records.code_hash(), launches, why, at)
    record(verdict, run)
    return verdict


def _legs(form: str, ranks: int) -> dict[str, Point]:
    """Legs of the stress run that make its short form, by name: of each kind, the first of each way to share queries."""
    from m3cp import stress

    chosen: dict[tuple, tuple[str, Point]] = {}
    for leg in stress.legs(ranks, "cuda"):
        point = leg.point
        if point.form == form:
            chosen.setdefault((stress.kind_of(leg), point.arm, point.queries), (f"{stress.kind_of(leg)} {leg.name}", point))
    return dict(chosen.values())


def legs(form: str, ranks: int) -> list[str]:
    """Names of the legs that the check of a form runs."""
    return list(_legs(form, ranks))


def points(form: str, ranks: int) -> list[Point]:
    """Points that the check of a form launches."""
    return list(_legs(form, ranks).values())


def check(form: str, node: str, ranks: int, run: Path, seconds: float = STRESS_S, command: Sequence[str] | None = None) -> Verdict:
    """Make the stress check of a form in processes of its own and keep what it said; hangs and crashes are refusals.

    Args:
        form: "two_launch" or "one_launch".
        node, ranks: as in `Verdict`; one rank a GPU.
        run: folder for `trust.json`, the check's table and its log.
        command: what to run in the check's place; None is the stress run.

    Raises:
        ValueError: a form that waits for no other program.
        TooShort: no leg was wrong, but some did not run.
    """
    require("form", form, form in FORMS, f"one of {', '.join(FORMS)}")
    require("ranks", ranks, ranks > 1 or form == "one_launch", "2 or more: on one rank only 'one_launch' waits for anybody")
    out = run / f"stress_{form}.json"
    command = command or [
        sys.executable, "-m", "m3cp.stress", "--stress", "--minutes", f"{seconds / 60:g}", "--ranks", str(ranks),
        "--device", "cuda", "--out", str(out), "--only", *legs(form, ranks),
    ]  # fmt: skip
    print(f"stress check of form {form!r} on {node}, {ranks} ranks, {seconds:g} s and its set-up", flush=True)
    count, problems = compiled.ahead(points(form, ranks))  # the stress's time is for launches
    print("\n".join([f"{count} kernels compiled ahead", *problems]), flush=True)
    out.unlink(missing_ok=True)
    path = os.pathsep.join([str(records.PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = watchdog.run(command, seconds + SET_UP_S, run / "logs" / f"stress_{form}.log", env={"PYTHONPATH": path})
    try:
        found = json.loads(out.read_text())["legs"]
    except (OSError, ValueError, KeyError):
        found = []
    launches = sum(leg["launches"] for leg in found)
    wrong = next((leg for leg in found if leg["mismatches"] or leg["expiries"] or leg["error"]), None)
    why = ended.why
    if wrong:
        why = f"{wrong['leg']}: {wrong['mismatches']} mismatches, {wrong['expiries']} expired waits; {wrong['error'] or 'no error word'}"
    elif not why and not launches:
        why = "it ended without a launch"
    elif not why:
        idle = set(legs(form, ranks)) - {f"{leg['kind']} {leg['leg']}" for leg in found if leg["launches"]}
        if idle:
            raise TooShort(f"stress check of form {form!r} on {node}: {seconds:g} s were up before these legs ran: {', '.join(sorted(idle))}; the next try finds its kernels compiled")
    verdict = say(form, node, ranks, run, trusted=not why, launches=launches, why=why)
    print(verdict.text, flush=True)
    return verdict


def refusals(points: Iterable[Point], node: str, gpus: int, run: Path) -> dict[Point, str]:
    """Points whose form is refused on this node, each with the reason; a form not seen here before is checked first.

    Args:
        points: that are about to be measured on GPUs.
        gpus: here; a Point over more ranks is one process's and exchanges nothing.
        run: the run's folder.
    """
    refused: dict[Point, str] = {}
    mine = [p for p in points if p.form in FORMS]
    for form in FORMS:
        group = [p for p in mine if p.form == form]
        ranks = max((p.world for p in group if p.world <= gpus), default=1)
        if group and (ranks > 1 or form == "one_launch"):
            try:
                verdict = known(form, node, ranks, run) or check(form, node, ranks, run)
            except TooShort as why:
                refused |= dict.fromkeys(group, str(why))
                continue
            refused |= {} if verdict.trusted else dict.fromkeys(group, verdict.text)
    return refused
