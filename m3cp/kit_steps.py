"""The node kit's steps in rising risk: what each runs on a machine, which Points its sweeps measure, how long it may take."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from m3cp import records
from m3cp.kit_state import FACTS_FILE, PUBLISHED, STATE_FILE, Cut, LeftOut, now, read, write
from m3cp.shapes import IndexerShape, Point

MOST_RANKS = 4  # one a KV head: how the model is served
LEAST_S = 60.0  # that a step which can be cut is started for
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
    at = {"code_hash": records.code_hash(), **sweep.git_state(facts(run)["commit"]), "time_utc": now()}
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

    return [kit_page.page(run, {step.name: step.title for step in STEPS}).name]


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
