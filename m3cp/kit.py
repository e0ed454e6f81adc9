"""The first quarter of an hour on a node nobody has run on: every step in rising risk, each a process with a watchdog.

`make mi355x` on four MI355X, `make node` anywhere: doctor, footprint curve, staged check over the collectives, the
kernels that follow compiled side by side, engines, ping-pong, stress of the two forms whose programs wait, the published
shapes warm and cold, the targets' grid, what compilers made, AITER's CP selector, which waits without a bound; then fit,
policy, design review, one page, one archive. A step that hangs, crashes or finds nothing to
run is a line on the page, and the rest goes on. State stands in the run's folder: the same command goes on where the
last stretch stopped. Needs torch, triton, numpy, pandas, scipy and matplotlib; papermill only for the design review.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from m3cp import records, watchdog
from m3cp.shapes import IndexerShape, Point, require

STATE_FILE, FACTS_FILE = "kit.json", "facts.json"
PUBLISHED = "published"  # folder of the rows of the published shapes
DONE, FAILED, LEFT_OUT, CUT, RUNNING = "done", "failed", "left out", "cut short", "running"
LEFT_OUT_STATUS, CUT_STATUS = 3, 4  # exit statuses of a step beside 0
MOST_RANKS = 4  # one a KV head: how the model is served
STRETCH_MINUTES = 9.0
KEEP_S = 60.0  # of a stretch, for fit, policy, page and archive
LATE_S = 40.0  # between a sweep's own deadline and its watchdog: ranks start, and end the group that they are at
LEAST_S = 60.0  # that a step which can be cut is started for
TRIES = 2  # running, of a step that took the kit or its time down with it
TARGETS = [(context, batch) for context in (8192, 32768, 131072) for batch in (1, 8, 32)]


@dataclass(frozen=True)
class Step:
    """One step.

    Args:
        run: does the work in a process of its own; takes the run's folder and seconds, returns lines to print.
            Raises `LeftOut` where it has nothing to run here, `Cut` when its time was up with work left.
        usual_s: about what it takes on a node that works; with less left of a stretch it waits for the next one.
        limit_s: seconds after which the watchdog ends it.
        resumable: it uses whatever time there is and goes on later.
        always: it looks at what is there by now, so it runs at the end of every stretch.
        form: the kernels' form that is refused from then on when the step fails.
    """

    name: str
    title: str
    usual_s: float
    limit_s: float
    run: Callable[[Path, float], list[str]]
    resumable: bool = False
    always: bool = False
    form: str | None = None


class LeftOut(Exception):
    """A step that has nothing to run here; the message says why."""


class Cut(Exception):
    """A step whose time was up; what is done is kept."""


@dataclass
class Record:
    """What became of a step so far."""

    status: str = ""
    why: str = ""
    seconds: float = 0.0
    tries: int = 0
    lines: list[str] = field(default_factory=list)

    @property
    def words(self) -> str:
        """In one line: why not, else the last that it said."""
        said = [line for line in (self.why.splitlines()[:1] if self.why else self.lines) if line.strip()]
        return said[-1] if said else ""


@dataclass
class State:
    """The kit's memory: `kit.json` in the run's folder, written whole before and after each step."""

    name: str
    code_hash: str
    device: str | None = None  # that was asked for
    commit: str | None = None  # of this code, where the copy has no git history
    stretches: int = 0
    steps: dict[str, Record] = field(default_factory=dict)

    @classmethod
    def load(cls, run: Path, name: str, device: str | None = None, commit: str | None = None) -> State:
        """The folder's state, or a new one.

        Raises:
            ValueError: the folder belongs to other code.
        """
        values, code = read(run / STATE_FILE), records.code_hash()
        if values is None:
            return cls(name, code, device, commit)
        if values["code_hash"] != code:
            raise ValueError(f"out={str(run)!r}: holds a run of code {values['code_hash']}, this is {code}; give another --out")
        return cls.of(values)

    @classmethod
    def of(cls, values: dict[str, Any]) -> State:
        """What `save` wrote, whatever code is here."""
        return cls(**{**values, "steps": {name: Record(**step) for name, step in values["steps"].items()}})

    def save(self, run: Path) -> None:
        """Write it in one piece."""
        write(run / STATE_FILE, asdict(self))


def write(path: Path, value: Any) -> None:
    """A JSON file, put in place at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=1))
    os.replace(part, path)


def read(path: Path) -> Any:
    """A JSON file's value; None where there is none."""
    return json.loads(path.read_text()) if path.exists() else None


def facts(run: Path) -> dict[str, Any]:
    """{"device", "node", "ranks", "gpus", "arch", "commit"} of this machine and code; found by the first step that asks."""
    known = read(run / FACTS_FILE)
    if known:
        return known
    from m3cp import doctor, sweep

    asked = read(run / STATE_FILE) or {}
    device = doctor.sweep_device(asked.get("device"))
    gpus = doctor.devices() if device == "cuda" else ()
    count = len(gpus) if gpus else min(2, doctor.cpu().cores)
    ranks = max(w for w in doctor.WORLDS if w <= min(count, MOST_RANKS))
    known = {"device": device, "node": sweep.node_name(device, gpus, doctor.cpu()), "ranks": ranks, "gpus": len(gpus),
             "arch": gpus[0].arch if gpus else "", "commit": asked.get("commit")}  # fmt: skip
    write(run / FACTS_FILE, known)
    return known


def _on_gpus(here: dict[str, Any], ranks: int = 1) -> None:
    if here["device"] != "cuda":
        raise LeftOut("needs GPUs, this is a CPU")
    if here["ranks"] < ranks:
        raise LeftOut(f"needs {ranks} GPUs, found {here['gpus']}")


def doctor_step(run: Path, seconds: float) -> list[str]:
    """The doctor's report and the provenance that every row will carry."""
    from m3cp import doctor, sweep

    node = doctor.inspect(facts(run)["device"])
    at = {"code_hash": records.code_hash(), **sweep.git_state(facts(run)["commit"]), "time_utc": _now()}
    write(run / "provenance.json", {**doctor.provenance(), **at})
    text = doctor.report(node)
    (run / "doctor.txt").write_text(text + "\n")
    here = facts(run)
    return [*text.splitlines(), f"{here['node']}, {here['ranks']} ranks take part; {len(node.problems)} problems named"]


def footprint(run: Path, seconds: float) -> list[str]:
    """Read rates by footprint on one rank, and one rank's paths checked."""
    return _node_check(run, 1)


def staged(run: Path, seconds: float) -> list[str]:
    """The staged form's paths over all ranks' collectives against the reference; latencies; a graph node's cost."""
    here = facts(run)
    if here["ranks"] == 1:
        raise LeftOut("one rank has nobody to exchange with")
    return _node_check(run, here["ranks"])


def _node_check(run: Path, world: int) -> list[str]:
    from m3cp import node_check

    here = facts(run)
    found = node_check.run(here["device"], [world], quick=here["device"] == "cpu", curves=world == 1, commit=here["commit"])
    write(run / f"node_check_{world}.json", found)
    wrong = [f"P={c['world']} {c['path']}" for c in found["checks"] if not c["passed"]]
    if wrong or not found["checks"]:
        raise RuntimeError(f"wrong ids: {', '.join(wrong) or 'nothing was checked'}")
    lines = [f"{len(found['checks'])} paths right over {world} ranks, {sum(c['rows'] for c in found['checks'])} rows"]
    random = [c["gbs"] for c in found["curve"] if c["order"] == "random"]
    if random:
        lines.append(f"random pages: {random[0]:.0f} GB/s at 1 MiB, {random[-1]:.0f} GB/s at the largest footprint")
    lines += [f"graph, P={g['world']}: {g['us']:.2f} µs a node: {g['node']}" for g in found["gaps"]]
    return lines


def kernels(run: Path, seconds: float) -> list[str]:
    """The one- and two-launch kernels of the steps that follow, compiled side by side into Triton's cache."""
    here = facts(run)
    _on_gpus(here)
    from m3cp import compiled, trust

    forms = [f for f in trust.FORMS if here["ranks"] > 1 or f == "one_launch"]
    points = [p for f in forms for p in trust.points(f, here["ranks"])] + published_points(here, "warm") + target_points(here)
    count, problems = compiled.ahead(points, seconds - 10)
    if problems:
        raise RuntimeError(f"of {count} kernels not all compiled, so ranks will try one after another: {'; '.join(problems[:5])}")
    return [f"{count} kernels of the one- and two-launch forms are in Triton's cache"]


def engine_arms(run: Path, seconds: float) -> list[str]:
    """vLLM's and SGLang's kernels, as far as this image has them, beside ours at a few shapes."""
    _on_gpus(facts(run))
    from m3cp import engine_kernels

    lacking = {arm: engine_kernels.missing(arm) for arm in engine_kernels.MODULES}
    if all(lacking.values()):
        raise LeftOut("; ".join(f"{arm}: {why}" for arm, why in lacking.items()))
    common = dict(world=facts(run)["ranks"], max_context=131_072)
    points = []
    for context, batch in ((8192, 1), (32768, 8), (131072, 32)):
        points += [Point(context, batch, arm="vllm_tp", **common), Point(context, batch, arm="tp", form="staged", **common)]
        for arm in ("vllm_cp", "sglang_cp"):
            points.append(Point(context, batch, arm=arm, exchange="collective", queries="gathered", **common))
    return _sweep(run, points, seconds)


def aiter(run: Path, seconds: float) -> list[str]:
    """AITER's kernels, called by their public signature."""
    here = facts(run)
    _on_gpus(here)
    from m3cp import aiter_arm

    why = aiter_arm.missing()
    if why:
        raise LeftOut(why)
    return _aiter_lines(run, "aiter.json", aiter_arm.run(here["device"], here["ranks"]))


def aiter_cp(run: Path, seconds: float) -> list[str]:
    """AITER's CP, scores and selector, between all ranks: its waits have no bound, so everything else comes first."""
    here = facts(run)
    _on_gpus(here, 2)
    from m3cp import aiter_arm, pingpong

    why = aiter_arm.missing_cp()
    if why:
        raise LeftOut(why)
    pairs = (read(run / "pingpong.json") or {"pairs": []})["pairs"]
    if not pairs or any(p["grain"] == pingpong.COARSE for p in pairs):
        raise LeftOut("it would poll memory that did not pass the ping-pong as fine-grained")
    return _aiter_lines(run, "aiter_cp.json", aiter_arm.run(here["device"], here["ranks"], between=True))


def _aiter_lines(run: Path, name: str, found: dict[str, Any]) -> list[str]:
    write(run / name, found)
    return [f"{a['arm']} {a['context_tokens']} x{a['batch']} P={a['world']}: {a['us']:.1f} µs ({a['label']})" for a in found["arms"]]


def ping_pong(run: Path, seconds: float) -> list[str]:
    """Words in turns between every pair of GPUs; coarse-grained memory refuses the forms that poll it."""
    from m3cp import pingpong, trust

    here = facts(run)
    if here["ranks"] == 1:
        raise LeftOut("one rank has no pair")
    found = pingpong.run(here["device"], here["ranks"])
    write(run / "pingpong.json", found)
    lines = [f"{p['a']} to {p['b']}: {p['turn_us']:.2f} µs there and back, {p['memory']} {p['grain']}" for p in found["pairs"]]
    coarse = [f"{p['a']} to {p['b']}" for p in found["pairs"] if p["grain"] == pingpong.COARSE]
    if coarse:
        why = f"the memory that peers map is coarse-grained between GPUs {', '.join(coarse)}"
        for form in trust.FORMS:
            trust.say(form, here["node"], here["ranks"], run, trusted=False, why=why)
        raise RuntimeError(f"{why}: two_launch and one_launch are refused here")
    return lines


def stress(form: str) -> Callable[[Path, float], list[str]]:
    """The stress check of one form."""

    def step(run: Path, seconds: float) -> list[str]:
        from m3cp import trust

        here = facts(run)
        _on_gpus(here, 1 if form == "one_launch" else 2)
        verdict = trust.known(form, here["node"], here["ranks"], run)
        if verdict is None or verdict.trusted:  # a refusal stands; trust is earned on this very node
            try:
                verdict = trust.check(form, here["node"], here["ranks"], run)
            except trust.TooShort as why:
                print(why, flush=True)
                verdict = trust.check(form, here["node"], here["ranks"], run)  # too short again fails this step, or nothing behind it would ever run
        if not verdict.trusted:
            raise RuntimeError(verdict.text)
        return [verdict.text]

    return step


def published_points(here: dict[str, Any], cache: str) -> list[Point]:
    """The 17 published shapes, fp8 as published: ours staged and in one launch, SGLang's own where it can be."""
    path = records.PACKAGE.parent / "data" / "published" / "indexer_latency_mi355x_tp4.csv"
    points: list[Point] = []
    if here["device"] == "cpu":
        return _rehearsal(here, [(2560, 1)], init_blocks=1, local_blocks=2) if cache == "warm" else []
    for line in csv.DictReader(path.read_text().splitlines()):
        cell = int(line["context_tokens"]), int(line["batch"])
        common = dict(
            mix=line["mix"], world=here["ranks"], shape=IndexerShape(init_blocks=1, local_blocks=2), cache=cache, max_context=131_072,
            dtype="fp8_e4m3fnuz" if here["arch"] == "gfx942" else "fp8_e4m3fn",
        )  # fmt: skip
        ways = (("staged", "collective"), ("staged", "symmetric"), ("one_launch", "symmetric"))
        points += _with_floors(
            [Point(*cell, arm="tp", form=form, **common) for form in ("staged", "one_launch")]
            + [Point(*cell, arm="cp", form=form, exchange=exchange, queries="gathered", **common) for form, exchange in ways]
            + [Point(*cell, arm="sglang_cp", exchange="collective", queries="gathered", **common)],
            here,
        )
    return points


def target_points(here: dict[str, Any]) -> list[Point]:
    """The targets' shapes, bf16, cold: one launch gathered and replicated, two launches, staged over the collectives."""
    if here["device"] == "cpu":
        return _rehearsal(here, [(2560, 1), (3072, 1), (4096, 1), (2560, 2), (4096, 2)])
    points: list[Point] = []
    for cell in TARGETS:
        common = dict(world=here["ranks"], max_context=131_072)
        points += _with_floors(
            [Point(*cell, arm="tp", form=form, **common) for form in ("one_launch", "staged")]
            + [Point(*cell, arm="cp", form="one_launch", exchange="symmetric", queries=q, **common) for q in ("gathered", "replicated")]
            + [Point(*cell, arm="cp", form="two_launch", exchange="symmetric", queries="gathered", **common)]
            + [Point(*cell, arm="cp", form="staged", exchange="collective", queries="gathered", **common)],
            here,
        )
    return points


def _with_floors(points: list[Point], here: dict[str, Any]) -> list[Point]:
    from m3cp import traffic

    points = [p for p in points if here["ranks"] > 1 or p.arm == "tp"]
    return [*dict.fromkeys(traffic.floor_point(p) for p in points), *points]


def _rehearsal(here: dict[str, Any], cells: Sequence[tuple[int, int]], **shape: int) -> list[Point]:
    """Small warm Points for a CPU, where the kit can only be rehearsed."""
    common = dict(world=here["ranks"], max_context=4096, cache="warm", launch="eager", shape=IndexerShape(**shape))
    points = [Point(*cell, arm="tp", form="staged", **common) for cell in cells]
    points += [Point(*cell, arm="cp", form="staged", exchange="collective", queries="gathered", **common) for cell in cells]
    return _with_floors(points, here)


def published(cache: str) -> Callable[[Path, float], list[str]]:
    """A sweep of the published shapes in one cache state."""

    def step(run: Path, seconds: float) -> list[str]:
        from m3cp import trust

        points = published_points(facts(run), cache)
        if not points:
            raise LeftOut("a CPU rehearses one cache state only")
        # A folder of their own: published constants differ from the model's, and a policy is of one set of constants.
        apart = run / PUBLISHED
        apart.mkdir(exist_ok=True)
        for name in (FACTS_FILE, trust.FILE):
            if (run / name).exists():
                shutil.copy(run / name, apart / name)
        return _sweep(apart, points, seconds)

    return step


def targets(run: Path, seconds: float) -> list[str]:
    """A sweep of the targets' grid."""
    return _sweep(run, target_points(facts(run)), seconds)


def _sweep(run: Path, points: Sequence[Point], seconds: float) -> list[str]:
    """Measure what of these Points the run lacks; forms that are not trusted here are refused by the sweep itself.

    Raises:
        Cut: the time was up.
        RuntimeError: nothing was measured, or Points failed.
    """
    from m3cp import sweep

    here, wanted = facts(run), set(points)

    def newest() -> dict[Point, records.Row]:
        found = records.load(run) if records.rows_files(run) else []
        return {row.point: row for row in found if row.point in wanted}

    before = newest()
    # What failed is tried again once nothing is left that was never tried.
    todo = [p for p in points if p not in before] or [p for p in points if before[p].status != "ok"]
    status = sweep.main(todo, out=run, device=here["device"], minutes=max(0.1, seconds / 60), commit=here["commit"], ahead=False) if todo else 0
    after = newest()
    ok = [p for p, row in after.items() if row.status == "ok"]
    failed = [f"{p.label}: {row.error}" for p, row in after.items() if row.status == "failed"]
    skipped = sorted({row.error for row in after.values() if row.status == "skipped"})
    missing = len(wanted) - len(after)
    lines = [*(f"skipped: {why}" for why in skipped), f"{len(ok)} of {len(wanted)} Points measured"]
    if missing and (len(after) > len(before) or not failed) and status != sweep.NOT_MEASURED:
        raise Cut(f"{lines[-1]}, {missing} to come" + (f", {len(failed)} failed" if failed else ""))
    if failed or not ok:
        raise RuntimeError("; ".join([lines[-1], *failed[:5], *lines[:-1]]))
    return lines


def compilers(run: Path, seconds: float) -> list[str]:
    """Registers, LDS, occupancy and spills of every kernel, compiled for this GPU's architecture."""
    from m3cp import compiled, doctor

    arch = facts(run)["arch"] or "gfx950"  # without a GPU: what the kit is made for
    if arch not in compiled.TARGETS:
        raise LeftOut(f"{arch}: known are {', '.join(compiled.TARGETS)}")
    found = compiled.resources(arch, processes=doctor.cpu().cores)
    write(run / "resources.json", {"target": arch, "kernels": [asdict(r) for r in found]})
    spilling = [f"{r.kernel} ({r.spills})" for r in found if r.spills]
    return [*compiled.table(arch, found), f"{len(found)} kernels for {arch}; spills to memory: {', '.join(spilling) or 'none'}"]


def fit(run: Path, seconds: float) -> list[str]:
    """Comparisons, maps, curves and how good the model is, drawn without notebooks."""
    from m3cp import kit_page

    return kit_page.analyse(run)


def policy(run: Path, seconds: float) -> list[str]:
    """The policy file of what was measured most."""
    from m3cp import advice

    try:
        return advice.main(str(run), run / "policy_cp.json")
    except (FileNotFoundError, ValueError) as error:
        raise LeftOut(f"not enough rows yet: {error}") from None


def report(run: Path, seconds: float) -> list[str]:
    """The design review, where papermill is here."""
    try:
        import nbconvert  # noqa: F401
        import papermill  # noqa: F401
    except ImportError as error:
        raise LeftOut(f"{error}; `m3cp report --node RUN` makes the design review where it is") from None
    from m3cp import review

    try:
        review.gather(str(run))
    except (FileNotFoundError, ValueError) as error:
        raise LeftOut(f"not enough rows yet: {error}") from None
    from m3cp import report as reporting

    return reporting.main(str(run), None, run / "report")


def page(run: Path, seconds: float) -> list[str]:
    """One page of everything."""
    from m3cp import kit_page

    return [str(kit_page.page(run).name)]


# Seconds that are usual, with room: two H200 without compiled kernels took 433 in all (LOG.md, 2026-11-30).
STEPS = (
    Step("doctor", "what this machine is", 15, 90, doctor_step),
    Step("footprint", "read rate by footprint, page read", 40, 150, footprint),
    Step("staged", "staged check over the collectives, cost of a graph's node", 50, 180, staged),
    Step("kernels", "kernels of the steps that follow, compiled side by side", 45, 180, kernels),
    Step("engines", "engines' kernels of this image", LEAST_S, 150, engine_arms, resumable=True),
    Step("aiter", "AITER's kernels, never run before", 60, 180, aiter),
    Step("pingpong", "words between every two GPUs, and what memory they got", 25, 90, ping_pong),
    Step("stress_two_launch", "two launches under stress", 75, 200, stress("two_launch"), form="two_launch"),
    Step("stress_one_launch", "one launch under stress", 75, 200, stress("one_launch"), form="one_launch"),
    Step("published_warm", "the 17 published shapes, warm as published", LEAST_S, 240, published("warm"), resumable=True),
    Step("published_cold", "the 17 published shapes, cold", LEAST_S, 240, published("cold"), resumable=True),
    Step("targets", "the targets' grid", LEAST_S, 240, targets, resumable=True),
    Step("compilers", "registers, LDS, occupancy, spills", 45, 180, compilers),
    Step("aiter_cp", "AITER's CP selector between GPUs, never run before", 60, 90, aiter_cp),
    Step("fit", "fit and figures", 40, 150, fit, always=True),
    Step("policy", "policy", 10, 60, policy, always=True),
    Step("report", "design review", 60, 150, report, always=True),
    Step("page", "the page", 5, 60, page, always=True),
)  # fmt: skip


def command_of(step: Step, run: Path, seconds: float) -> list[str]:
    """How a step is started."""
    return [sys.executable, "-m", "m3cp.kit", "--step", step.name, "--out", str(run), "--seconds", f"{seconds:.0f}"]


def take(step: Step, state: State, run: Path, limit_s: float, command: Sequence[str], follow: Callable[[str], None]) -> Record:
    """Run one step under its watchdog and record what became of it, before and after."""
    record = state.steps.setdefault(step.name, Record())
    record.tries += 1
    record.status, record.why = RUNNING, ""
    state.save(run)
    lines = run / "said" / f"{step.name}.json"
    lines.unlink(missing_ok=True)
    path = os.pathsep.join([str(records.PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    log = run / "logs" / f"{step.name}.log"
    ended = watchdog.run(command, limit_s, log, cwd=records.PACKAGE.parent, env={"PYTHONPATH": path}, follow=follow)
    said = read(lines) or {}
    record.seconds += ended.seconds
    record.lines = said.get("lines", [])
    if ended.code in (0, LEFT_OUT_STATUS, CUT_STATUS):
        record.tries = 0  # it ended by its own will
    if ended.code == 0:
        record.status = DONE
    elif ended.code == LEFT_OUT_STATUS:
        record.status, record.why = LEFT_OUT, said.get("why", "")
    elif ended.code == CUT_STATUS or (ended.hung and limit_s < step.limit_s and record.tries < TRIES):
        record.status, record.why = CUT, said.get("why", "") or ended.why
    else:
        record.status, record.why = FAILED, said.get("why", "") or ended.why
        if step.form:
            _refuse(step.form, run, record.why)
    state.save(run)
    return record


def _refuse(form: str, run: Path, why: str) -> None:
    """Keep the refusal of a form whose stress did not come to its own verdict: it hung, or took the process with it."""
    from m3cp import trust

    here = read(run / FACTS_FILE)
    if here and not any(v.form == form and not v.trusted for v in trust.load(run / trust.FILE)):
        trust.say(form, here["node"], here["ranks"], run, trusted=False, why=why)


def stretch(
    run: Path, name: str, minutes: float = STRETCH_MINUTES, steps: Sequence[Step] = STEPS, retry: bool = False, only: Sequence[str] = (),
    device: str | None = None, commit: str | None = None, command: Callable[[Step, Path, float], Sequence[str]] = command_of, keep_s: float = KEEP_S,
) -> State:  # fmt: skip
    """Run what is left of the kit for at most `minutes`, then analyse what there is; the state and an archive stay.

    Args:
        run: the run's folder; made when missing.
        name: of the archive.
        retry: steps that failed are tried again.
        only: names of the steps to run; all when empty.
        device: "cuda" or "cpu"; None for what the machine has. A folder keeps what it began with.
        commit: of this code, where the copy that runs has no git history.
        command: how a step is started.
        keep_s: seconds at the end that measuring leaves alone.

    Raises:
        ValueError: too few minutes, a step that does not exist, or a folder of other code.
    """
    began = time.monotonic()
    unknown = sorted(set(only) - {s.name for s in steps})
    require("only", tuple(only), not unknown, f"among {', '.join(s.name for s in steps)}")
    # The longest step must fit.
    least = (max((s.usual_s for s in steps if not s.always), default=0) + keep_s) / 60
    require("minutes", minutes, minutes >= least, f"{least:.1f} or more: the longest step and the analysis must fit")
    run.mkdir(parents=True, exist_ok=True)
    state = State.load(run, name, device, commit)
    state.stretches += 1
    for record in state.steps.values():  # the last stretch ended within this step, and not by its own will
        if record.status == RUNNING:
            record.status, record.why = (CUT, "the kit was ended within it") if record.tries < TRIES else (
                FAILED, f"the kit was ended within it {record.tries} times")  # fmt: skip
    state.save(run)
    wanted = [s for s in steps if not only or s.name in only]
    todo = [s for s in wanted if not s.always and _open(state, s, retry)]
    print(f"{name}: {len(todo)} steps to run, at most {minutes:g} minutes now; {run}", flush=True)
    while todo:
        step = todo.pop(0)
        left = minutes * 60 - (time.monotonic() - began) - keep_s
        untold = [s.title for s in wanted[: wanted.index(step)] if s.form and _open(state, s, False)] if step.resumable else []
        if left < step.usual_s or untold:  # a sweep would make the missing stress check itself, out of its own time
            record = state.steps.setdefault(step.name, Record())
            why = f"waits for {untold[0]}" if untold else "the stretch's time was up"
            record.status, record.why = CUT, record.why or f"{why}: run the same command again"
            continue
        limit = min(step.limit_s, left)
        # A sweep stops by itself; the watchdog gives it time to write down what it was at.
        grace = min(LATE_S, 0.4 * limit) if step.resumable else 0.0
        record = _tell(step, limit, lambda follow, step=step, limit=limit, grace=grace: take(
            step, state, run, limit, command(step, run, limit - grace), follow))  # fmt: skip
        if record.status == CUT and step.resumable:
            todo.append(step)  # goes on where it stopped, once the others had their turn
    for step in (s for s in wanted if s.always):
        _tell(step, step.limit_s, lambda follow, step=step: take(step, state, run, step.limit_s, command(step, run, step.limit_s), follow))
    print(f"archive: {archive(run, name)}", flush=True)
    return state


def _tell(step: Step, limit_s: float, act: Callable[[Callable[[str], None]], Record]) -> Record:
    """Say what starts, how it moves and how it ended."""
    print(f"{step.title}: usually {step.usual_s:.0f} s, at most {limit_s:.0f} s", flush=True)
    record = act(_Follow(limit_s))
    tail = record.words
    print(f"    {record.status} in {record.seconds:.0f} s{': ' + tail if tail else ''}", flush=True)
    return record


def _open(state: State, step: Step, retry: bool) -> bool:
    """Whether a measuring step still has something to do."""
    record = state.steps.get(step.name)
    return record is None or record.status in ("", CUT) or (retry and record.status in (FAILED, LEFT_OUT))


class _Follow:
    """A step's progress: its bar on a terminal, a line every half minute elsewhere."""

    def __init__(self, limit_s: float):
        self._limit, self._start, self._told = limit_s, time.monotonic(), 0.0
        self._terminal = sys.stdout.isatty()

    def __call__(self, words: str) -> None:
        past = time.monotonic() - self._start
        if past - self._told < (0.5 if self._terminal else 30.0):
            return
        self._told = past
        bar = "#" * min(20, round(20 * past / self._limit))
        text = f"    [{bar:20}] {past:.0f} s: {words}"[:150]
        print(f"\r{text:150}" if self._terminal else text, end="\r" if self._terminal else "\n", flush=True)


def archive(run: Path, name: str) -> Path:
    """Everything of the run in one `<name>.tar.gz` in its folder: rows, provenance, results, figures, logs, the page."""
    path = run / f"{name}.tar.gz"
    part = path.with_suffix(".part")
    with tarfile.open(part, "w:gz") as tar:
        for file in sorted(run.rglob("*")):
            if file.is_file() and not file.name.endswith((".part", ".tar.gz")):
                tar.add(file, arcname=f"{name}/{file.relative_to(run)}", filter=_anonymous)
    os.replace(part, path)
    return path


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def default_out(name: str) -> Path:
    """A folder for this code's run: other code begins another one."""
    return records.PACKAGE.parent / "data" / "runs" / f"{name}-{records.code_hash()}"


def run_step(name: str, run: Path, seconds: float) -> int:
    """What a step's process does; the exit status. Its words go to `said/`, for the page."""
    step = next(s for s in STEPS if s.name == name)
    said: dict[str, Any] = {"time_utc": _now()}
    status = 0
    try:
        said["lines"] = [line.replace(str(run), run.name) for line in step.run(run, seconds)]
        print("\n".join(said["lines"]), flush=True)
    except LeftOut as why:
        said["why"], status = str(why), LEFT_OUT_STATUS
    except Cut as why:
        said["why"], status = str(why), CUT_STATUS
    except Exception as error:
        import traceback

        traceback.print_exc()
        said["why"], status = _shortened(f"{type(error).__name__}: {error}"), 1
    write(run / "said" / f"{name}.json", said)
    return status


def _shortened(text: str) -> str:
    """At most 1500 letters; where the first line only announces (`...Error:`), the last one follows it."""
    lines = text.splitlines()
    if len(lines) > 1 and lines[0].rstrip().endswith(":"):
        text = "\n".join([f"{lines[0].rstrip()} {next((x for x in reversed(lines[1:]) if x.strip()), '').strip()}"[:600], *lines[1:]])
    return text if len(text) <= 1500 else f"{text[:700]}\n...\n{text[-795:]}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def main(
    name: str = "node", out: Path | None = None, minutes: float = STRETCH_MINUTES, retry: bool = False, only: Sequence[str] = (),
    device: str | None = None, commit: str | None = None,
) -> int:  # fmt: skip
    """What `m3cp node` does; 0 when no step failed and none is left, 1 when one failed, 2 when time was up before the end."""
    run = (out or default_out(name)).resolve()
    state = stretch(run, name, minutes, retry=retry, only=only, device=device, commit=commit)
    statuses = [record.status for record in state.steps.values()]
    if CUT in statuses:
        print("not done yet: the same command goes on where this stretch stopped", flush=True)
    return 1 if FAILED in statuses else 2 if CUT in statuses else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python3 -m m3cp.kit", description=__doc__.splitlines()[0])
    parser.add_argument("--name", default="node", help="of the run's folder and archive")
    parser.add_argument("--out", type=Path, help="the run's folder")
    parser.add_argument("--minutes", type=float, default=STRETCH_MINUTES, help="at most so long now; the same command goes on later")
    parser.add_argument("--retry", action="store_true", help="try steps again that failed or were left out")
    parser.add_argument("--only", nargs="*", default=[], metavar="STEP", help=", ".join(s.name for s in STEPS))
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPUs where there are any; a CPU rehearses")
    parser.add_argument("--commit", help="of this code, where the copy that runs has no git history")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    given = _arguments(None)
    if given.step:
        sys.exit(run_step(given.step, given.out, given.seconds))
    try:
        sys.exit(main(given.name, given.out, given.minutes, given.retry, given.only, given.device, given.commit))
    except ValueError as problem:
        print(f"m3cp node: {problem}", file=sys.stderr)
        sys.exit(2)
