"""The node kit: faults at every step, stretches, refused forms, the archive; and one rehearsal with real ranks on the CPU."""

import html
import itertools
import json
import re
import sys
import tarfile
import time
from dataclasses import replace

import drivers
import numpy as np
import pytest
import synthetic

from m3cp import (
    aiter_arm,
    compiled,
    crossover,
    fit,
    frames,
    kit,
    kit_page,
    kit_state,
    kit_steps,
    pingpong,
    plots,
    records,
    sweep,
    trust,
    watchdog,
)
from m3cp.kit_state import CUT, DONE, FAILED, LEFT_OUT, RUNNING
from m3cp.kit_steps import STEPS
from m3cp.shapes import Point

PYTHON = [sys.executable, "-I", "-S", "-c"]
# What a step may do instead of its work, and what the page must say of it.
FAULTS = {
    "hang": (["sh", "-c", "echo waiting for rank 2; sleep 60 & sleep 60"], "not done within 1 s, ended; it last said: waiting for rank 2"),
    "crash": (["sh", "-c", "echo launching; kill -SEGV $$"], "ended by SIGSEGV; it last said: launching"),
    "abort": (["sh", "-c", "echo Memory access fault by GPU node-2 >&2; kill -ABRT $$"], "ended by SIGABRT; it last said: Memory access fault by GPU node-2"),
    "device memory": ([*PYTHON, "raise RuntimeError('HIP out of memory. Tried to allocate 32 GiB')"], "out of memory: RuntimeError: HIP out of memory"),
    "host memory": (["sh", "-c", "kill -KILL $$"], "ended by SIGKILL, as a host out of memory does"),
    "missing tool": (["no-such-amd-smi"], "could not start no-such-amd-smi: No such file or directory"),
    "error": (["sh", "-c", "echo rank 1: wrong ids; exit 1"], "exit status 1: rank 1: wrong ids"),
}  # fmt: skip
FINE = ["sh", "-c", "true"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Verdicts of these tests stay out of the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def here(tmp_path):
    """A run's folder that knows four made-up GPUs."""
    run = tmp_path / "run"
    kit_state.write(run / kit_state.FACTS_FILE, {"device": "cuda", "node": "4x AMD Instinct MI355X", "ranks": 4, "gpus": 4, "arch": "gfx950", "commit": None})
    return run


def quick(steps=STEPS):
    """The kit's own steps with limits of a second."""
    return [replace(s, limit_s=1.0, usual_s=1.0) for s in steps]


def go(run, commands, **options):
    given = {"minutes": 5.0, "steps": quick(), "keep_s": 0.0} | options
    return kit.stretch(run, "node", command=lambda step, folder, seconds: commands.get(step.name, FINE), **given)


@pytest.mark.parametrize("odd", [0, 1])
def test_a_fault_in_any_step_leaves_the_rest_usable(here, odd):
    """Every second step fails, each in the next way, and in the other case every other one: each step has a fault, each a faulty neighbour."""
    faulty = dict(zip([s.name for s in STEPS][odd::2], itertools.cycle([FAULTS[name] for name in FAULTS if name != "hang"]), strict=False))
    state = go(here, {name: command for name, (command, _) in faulty.items()})
    assert {n: r.status for n, r in state.steps.items()} == {s.name: FAILED if s.name in faulty else DONE for s in STEPS}
    assert len(faulty) >= len(FAULTS) - 1, "every fault is among them"
    with tarfile.open(here / "node.tar.gz") as tar:
        held = json.load(tar.extractfile("node/kit.json"))
    page = kit_page.page(here, {s.name: s.title for s in STEPS}).read_text()
    for name, (_, words) in faulty.items():
        assert words in state.steps[name].why and held["steps"][name]["status"] == FAILED and html.escape(words) in page


def test_a_hang_in_every_step_ends_in_time_and_leaves_no_process(here):
    marks = here / "marks"
    marks.mkdir(parents=True, exist_ok=True)
    script = "echo waiting for rank 2; (sleep 3; touch %s) & sleep 60"
    began = time.monotonic()
    state = go(here, {s.name: ["sh", "-c", script % (marks / s.name)] for s in STEPS}, steps=[replace(s, limit_s=0.1, usual_s=0.1) for s in STEPS])
    assert time.monotonic() - began < 30
    assert {r.status for r in state.steps.values()} == {FAILED} and len(state.steps) == len(STEPS)
    assert all(re.search("not done within 0 s, ended; it last said: waiting for rank 2", r.why) for r in state.steps.values())
    time.sleep(3.2)
    assert list(marks.iterdir()) == [], "what a step started outlived it"


@pytest.mark.parametrize("form", trust.FORMS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_form_whose_stress_fails_is_refused_from_then_on(here, form, fault):
    command, words = FAULTS[fault]
    go(here, {f"stress_{form}": command}, steps=quick([s for s in STEPS if s.form == form]))
    for run in (here, here.parent / "another run"):  # beside the run, and for this user
        verdict = trust.known(form, "4x AMD Instinct MI355X", 2, run)
        assert not verdict.trusted and words in verdict.text and f"form '{form}' is refused" in verdict.text
    other = next(f for f in trust.FORMS if f != form)
    assert trust.known(other, "4x AMD Instinct MI355X", 4, here) is None
    assert trust.known(form, "2x NVIDIA H200", 2, here) is None


def test_a_verdict_is_of_this_code_and_at_least_as_many_ranks(here, monkeypatch):
    trust.say("one_launch", "2x GPU", 2, here, trusted=True, launches=1000)
    assert trust.known("one_launch", "2x GPU", 2, here).trusted and trust.known("one_launch", "2x GPU", 1, here).trusted
    assert trust.known("one_launch", "2x GPU", 4, here) is None
    monkeypatch.setattr(records, "code_hash", lambda: "another")
    assert trust.known("one_launch", "2x GPU", 2, here) is None


def point(form, world=2, arm="cp"):
    ways = {"exchange": "symmetric", "queries": "gathered"} if arm == "cp" else {}
    return Point(8192, 1, arm=arm, form=form, world=world, **ways)


class Asked(list):
    """(form, ranks, minutes) of each check; `ahead`: Points whose kernels were compiled before it."""


def checked(monkeypatch, results):
    """Stand in for the stress run: `results` says what each form's legs found; returns the forms that were checked."""
    asked, ahead = Asked(), []
    asked.ahead = ahead

    def run(command, limit_s, log, **options):
        out, ranks = command[command.index("--out") + 1], int(command[command.index("--ranks") + 1])
        form = re.search(r"stress_(\w+)\.json", out)[1]
        asked.append((form, ranks, float(command[command.index("--minutes") + 1])))
        legs, ended = results[form]
        if legs is not None:  # of the first names; the rest found nothing wrong
            names = trust.legs(form, ranks)
            legs = [one | dict(zip(("kind", "leg"), name.split(" ", 1), strict=True)) for one, name in zip([*legs, *[leg()] * len(names)], names, strict=False)]
            kit_state.write(log.parent.parent / f"stress_{form}.json", {"legs": legs})
        return ended

    monkeypatch.setattr(watchdog, "run", run)
    monkeypatch.setattr(compiled, "ahead", lambda points: ahead.append(points) or (len(points), []))
    return asked


def leg(**found):
    return {"leg": "a leg", "launches": 500, "mismatches": 0, "expiries": 0, "error": ""} | found


FINE_END = watchdog.Ended(0, 30.0, "")


def test_a_gpu_never_seen_is_checked_once_before_one_launch_is_trusted(here, monkeypatch):
    asked = checked(monkeypatch, {"one_launch": ([leg(), leg()], FINE_END)})
    points = [point("staged"), point("one_launch"), point("one_launch", 8), point("one_launch", arm="tp")]
    assert trust.refusals(points, "4x GPU", 4, here) == {}
    assert asked == [("one_launch", 2, 0.5)]
    assert trust.known("one_launch", "4x GPU", 2, here).launches == 500 * len(trust.legs("one_launch", 2))
    assert asked.ahead == [trust.points("one_launch", 2)], "the 30 s are for launches, not for the compiler"
    trust.refusals(points, "4x GPU", 4, here)
    assert len(asked) == 1
    trust.refusals([point("one_launch", 4)], "4x GPU", 4, here)
    assert asked[1:] == [("one_launch", 4, 0.5)], "more ranks than were checked"
    assert trust.refusals([point("staged")], "other GPU", 4, here) == {} and len(asked) == 2


@pytest.mark.parametrize(
    "legs, ended, words",
    [
        ([leg(), leg(mismatches=2)], watchdog.Ended(1, 9.0, "exit status 1: x"), "2 mismatches"),
        ([leg(expiries=1, error="rank 0 found error 2")], FINE_END, "rank 0 found error 2"),
        ([leg()], watchdog.Ended(-9, 180.0, "not done within 180 s, ended", True), "not done within 180 s"),
        (None, watchdog.Ended(-11, 3.0, "ended by SIGSEGV"), "ended by SIGSEGV"),
        ([leg(launches=0)] * 9, FINE_END, "ended without a launch"),
        (None, FINE_END, "ended without a launch"),
    ],
)
def test_what_fails_the_check_refuses_the_points_of_that_form_alone(here, monkeypatch, legs, ended, words):
    asked = checked(monkeypatch, {"one_launch": (legs, ended), "two_launch": ([leg()], FINE_END)})
    points = [point("staged"), point("two_launch"), point("one_launch"), point("one_launch", arm="tp")]
    refused = trust.refusals(points, "4x GPU", 4, here)
    assert set(refused) == set(points[2:]) and all(words in why and "refused" in why for why in refused.values())
    assert [form for form, *_ in asked] == ["two_launch", "one_launch"], "in rising risk"
    assert trust.refusals(points, "4x GPU", 4, here) == refused and len(asked) == 2


def test_a_check_without_the_time_for_all_legs_is_no_verdict(here, monkeypatch):
    """Nothing was wrong: a sweep skips the form now and checks it again next time; the kit checks it again at once, which decides."""
    asked = checked(monkeypatch, {"one_launch": ([leg(), leg(launches=0)], FINE_END)})
    words = "30 s were up before these legs ran: small cp/one_launch/symmetric/gathered 8k x1 P=2 graph"
    refused = trust.refusals([point("staged"), point("one_launch")], "4x GPU", 4, here)
    assert set(refused) == {point("one_launch")} and words in refused[point("one_launch")]
    assert trust.known("one_launch", "4x GPU", 2, here) is None
    trust.refusals([point("one_launch")], "4x GPU", 4, here)
    assert len(asked) == 2
    assert kit.run_step("stress_one_launch", here, 60) == 1 and len(asked) == 4 and words[:37] in kit_state.read(here / "said" / "stress_one_launch.json")["why"]
    assert trust.load(here / trust.FILE) == []
    answers = [trust.TooShort("x"), trust.Verdict("one_launch", True, "4x GPU", 4, "code", 7)]

    def second(*given):
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    monkeypatch.setattr(trust, "check", second)
    assert kit.run_step("stress_one_launch", here, 60) == 0 and not answers


def test_the_short_stress_names_legs_of_its_form_alone():
    for form in trust.FORMS:
        legs = trust.legs(form, 4)
        assert legs and all(f"/{form}" in words for words in legs)
        assert {words.split()[0] for words in legs} == {"small", "large", "eager"}
    one = " ".join(trust.legs("one_launch", 4))
    assert "gathered" in one and "replicated" in one and "tp/one_launch" in one


def test_a_verdict_file_that_is_broken_is_no_verdict(here):
    (here / trust.FILE).write_text("[{")
    assert trust.known("one_launch", "4x GPU", 4, here) is None
    trust.say("one_launch", "4x GPU", 4, here, trusted=True)
    assert trust.known("one_launch", "4x GPU", 4, here).trusted


def test_a_cache_that_cannot_be_written_is_done_without(here, tmp_path, monkeypatch):
    (tmp_path / "a file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    trust.say("one_launch", "4x GPU", 4, here, trusted=False, why="x")
    assert not trust.known("one_launch", "4x GPU", 4, here).trusted


def test_the_next_stretch_goes_on_where_the_last_stopped(here):
    """What is done stays done, what was cut goes on, what failed is tried again only when asked; analysis runs each time."""
    ran = here / "ran"

    def note(name, then="exit 0"):
        return ["sh", "-c", f"echo {name} >> {ran}; {then}"]

    steps = [replace(s, limit_s=4.0 if s.resumable else 2.0, usual_s=1.0) for s in STEPS if s.name in ("doctor", "staged", "targets", "compilers", "page")]
    commands = {s.name: note(s.name) for s in steps}
    commands |= {"staged": note("staged", "exit 1"), "targets": note("targets", f"sleep 1; exit {kit.CUT_STATUS}")}
    state = go(here, commands, steps=steps, minutes=8 / 60)
    assert {n: r.status for n, r in state.steps.items()} == {
        "doctor": DONE, "staged": FAILED, "targets": CUT, "compilers": DONE, "page": DONE,
    }  # fmt: skip
    first = ran.read_text().split()
    assert first[:4] == ["doctor", "staged", "targets", "compilers"] and first[-1] == "page"
    assert first.count("targets") > 1, "what was cut goes on in the same stretch once the others had their turn"
    ran.unlink()
    commands["targets"] = note("targets")
    state = go(here, commands, steps=steps)
    assert ran.read_text().split() == ["targets", "page"] and state.steps["targets"].status == DONE and state.stretches == 2
    ran.unlink()
    commands["staged"] = note("staged")
    state = go(here, commands, steps=steps, retry=True)
    assert ran.read_text().split() == ["staged", "page"] and state.steps["staged"].status == DONE


def test_a_sweep_waits_for_the_stress_checks_before_it(here):
    """Seen on two H200: with no time left for the check, the sweep behind it made the check itself and measured nothing."""
    steps = [s for s in quick() if s.name in ("engines", "stress_one_launch", "targets", "page")]
    short = [replace(s, usual_s=4.0) if s.form else replace(s, usual_s=0.2) for s in steps]
    state = go(here, {}, steps=short, minutes=1)
    assert {n: r.status for n, r in state.steps.items()} == dict.fromkeys(("engines", "stress_one_launch", "targets", "page"), DONE)
    again = here.parent / "again"
    kit_state.write(again / kit_state.FACTS_FILE, kit_state.read(here / kit_state.FACTS_FILE))
    state = go(again, {"engines": ["sleep", "0.5"]}, steps=short, minutes=5 / 60, keep_s=0.8)
    assert {n: r.status for n, r in state.steps.items()} == {"engines": DONE, "stress_one_launch": CUT, "targets": CUT, "page": DONE}
    assert state.steps["targets"].why == "waits for one launch under stress: run the same command again"


def test_its_analysis_takes_the_rows_of_its_own_steps(here, monkeypatch):
    """On GPUs the targets' grid has TP in two forms, and CP in one whose TP is not measured: seen on two H200, where the fit then failed."""
    gpus, rng = {"device": "cuda", "ranks": 2, "arch": "sm_90"}, np.random.default_rng(4)
    stages = {"staged": ["score", "choose"], "one_launch": ["decode"], "two_launch": ["score_and_push", "wait_and_choose"]}
    truth = {"tp": synthetic.FUSED_TP, "cp": synthetic.FUSED_CP}
    for folder, points in ((here, kit_steps.target_points(gpus)), (here / kit_state.PUBLISHED, kit_steps.published_points(gpus, "cold"))):
        folder.mkdir(exist_ok=True)
        timed = [p for p in points if p.arm in truth and (folder == here or p.form == "staged")]
        slower = {"one_launch": 0.0, "two_launch": 0.8, "staged": 2.0}
        rows = [synthetic.row(p, synthetic.truth_us(p, truth[p.arm]) + slower[p.form], rng, timed_region=stages[p.form], provenance=synthetic.PROVENANCE) for p in timed]
        records.append(folder / records.ROWS_FILE, *rows)
    saved = []
    monkeypatch.setattr(plots, "save", lambda figure, name, **stamp: saved.append(name))  # half of this test's time, and rehearsed below
    said = "\n".join(kit_page.analyse(here))
    for form in stages:
        assert f"CP {form}/" in said
    assert {"map_0", "published_map_0"} <= set(saved)
    records.append(here / records.ROWS_FILE, records.Row(rows[0].point.replace(seed=9), "skipped", "tp", "synthetic 2x H200", 0, error="not here"))
    loaded = frames.load_run(str(here))
    assert loaded.commit == "synthetic", "what was skipped has no commit"
    targets = crossover.comparisons(loaded.frame, fit.ALL_TERMS)
    two = next(c for c in targets if c.pairs["form"].iloc[0] == "two_launch")
    assert set(two.frame[two.frame["arm"] == "tp"]["form"]) == {"one_launch"}, "the fastest that was measured stands for its TP"
    staged = next(c for c in targets if c.pairs["form"].iloc[0] == "staged")
    assert set(staged.frame["form"]) == {"staged"}


def test_a_step_that_ends_the_kit_twice_is_given_up(here):
    """The state says `running` where the kit was killed, or the machine went down."""
    for expected in (DONE, FAILED):
        state = kit_state.State.load(here, "node")
        record = state.steps.setdefault("pingpong", kit_state.Record())
        record.status, record.tries = RUNNING, record.tries + (1 if expected == DONE else 2)
        if expected == FAILED:
            record.status = RUNNING
        state.save(here)
        found = go(here, {}, steps=quick([s for s in STEPS if s.name == "pingpong"])).steps["pingpong"]
        assert found.status == expected
    assert "ended within it" in found.why


def test_a_stretch_ends_in_its_time(here):
    commands = {s.name: ["sh", "-c", "sleep 30"] for s in STEPS if not s.always}
    began = time.monotonic()
    state = go(here, commands, minutes=4 / 60, steps=[replace(s, limit_s=1.5, usual_s=1.5) for s in STEPS], keep_s=1.0)
    assert time.monotonic() - began < 8
    waiting = [r for r in state.steps.values() if r.status == CUT]
    assert waiting and all("run the same command again" in r.why for r in waiting)
    assert state.steps["page"].status == DONE, "what is there is shown whatever was not reached"


def test_a_step_with_nothing_to_show_is_left_out_and_did_not_fail(here):
    """In a process of its own, as a stretch starts it: there `m3cp.kit` is `__main__`."""
    state = kit.stretch(here, "node", only=["fit"])
    assert (state.steps["fit"].status, state.steps["fit"].why) == (LEFT_OUT, "nothing was measured yet")


def test_bad_arguments_are_refused_by_name(here):
    with pytest.raises(ValueError, match=r"minutes=2: must be 2\.2 or more"):
        kit.stretch(here, "node", 2)
    with pytest.raises(ValueError, match="only=.*'fitt'.*must be among doctor, footprint"):
        kit.stretch(here, "node", only=["fitt"])
    kit_state.write(here / kit_state.STATE_FILE, {"name": "node", "code_hash": "other", "stretches": 1, "steps": {}})
    with pytest.raises(ValueError, match="holds a run of code other"):
        kit.stretch(here, "node")


def test_the_published_shapes_are_all_seventeen_in_the_forms_that_have_them(here):
    for cache in ("warm", "cold"):
        points = kit_steps.published_points(kit_steps.facts(here), cache)
        staged = [p for p in points if (p.arm, p.form) == ("tp", "staged")]
        assert len(staged) == 17 and all(p.dtype == "fp8_e4m3fn" and p.world == 4 and p.cache == cache for p in staged)
        assert all((p.shape.init_blocks, p.shape.local_blocks) == (1, 2) for p in points)
        assert sum(p.mix == "one_long_rest_1k" for p in staged) == 2
        assert sum((p.arm, p.form) == ("cp", "one_launch") for p in points) == 17
        assert {p.dtype for p in points} == {"fp8_e4m3fn"}
        assert sum(p.arm == "sglang_cp" for p in points) == 17
    assert {(p.context_tokens, p.batch) for p in kit_steps.target_points(kit_steps.facts(here))} == set(kit_steps.TARGETS)
    assert not [p for p in kit_steps.target_points({**kit_steps.facts(here), "ranks": 1}) if p.arm == "cp"]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_words_go_to_and_fro_between_every_pair(ranks):
    with drivers.forked():
        found = pingpong.run("cpu", ranks)
    assert [(p["a"], p["b"]) for p in found["pairs"]] == [(a, b) for a in range(ranks) for b in range(a + 1, ranks)]
    assert all(p["memory"] == "host shared memory" and p["turn_us"] > 0 and len(p["samples_us"]) == pingpong.REPEATS for p in found["pairs"])


def test_coarse_grained_memory_refuses_the_forms_that_poll_it(here, monkeypatch):
    pairs = [{"a": 0, "b": 1, "turn_us": 3.0, "samples_us": [3.0], "memory": "torch symmetric memory", "grain": pingpong.COARSE, "words": 256}]
    monkeypatch.setattr(pingpong, "run", lambda *_: {"node": "4x AMD Instinct MI355X", "pairs": pairs})
    assert kit.run_step("pingpong", here, 60) == 1
    for form in trust.FORMS:
        assert "coarse-grained between GPUs 0 to 1" in trust.known(form, "4x AMD Instinct MI355X", 2, here).text


def test_a_sweep_skips_a_refused_form_in_words(here, monkeypatch, capsys):
    """The hook in the sweep itself: what is refused is a skipped row that says why, and nothing of it is started."""
    trust.say("one_launch", "1x A GPU", 1, here, trusted=False, why="2 mismatches")
    gpu = sweep.doctor.Device(0, "amd", "A GPU", "gfx950", 256, 1 << 38, 1 << 22, 1 << 28)
    monkeypatch.setattr(sweep.doctor, "sweep_device", lambda asked=None: "cuda")
    monkeypatch.setattr(sweep.doctor, "devices", lambda: (gpu,))
    monkeypatch.setattr(sweep.doctor, "provenance", lambda: {"versions": {}})
    ahead = []
    monkeypatch.setattr(compiled, "ahead", lambda points, limit_s: ahead.append((points, limit_s)) or (1, ["exit status 1: no ptxas"]))
    sweep.main([point("one_launch", 1, "tp")], out=here, device="cuda", minutes=1)
    (row,) = records.load(here)
    assert row.status == "skipped" and "form 'one_launch' is refused on 1x A GPU" in row.error and "2 mismatches" in row.error
    assert ahead == [([], 30.0)], "kernels of what is measured alone, in at most half of the time"
    assert "not compiled ahead: exit status 1: no ptxas" in capsys.readouterr().out


def swept(monkeypatch, run, statuses):
    """Stand in for the sweep: each call gives the next Points without a row the next of `statuses`; returns what was asked for."""
    asked = []

    def main(points, out, **options):
        asked.append((points, options["commit"]))
        for point, status in zip(points, statuses.pop(0), strict=False):
            records.append(out / "rows.jsonl", records.Row(point, status, point.arm, "node", 1, error="" if status == "ok" else "wrong ids", **({} if status != "ok" else MEASURED)))
        return 0

    monkeypatch.setattr(sweep, "main", main)
    return asked


MEASURED = dict(samples_us=[1.0], rank_samples_us=[[1.0]], check={"passed": True, "rows": 1, "mismatches": 0, "against": "reference"})


def test_a_failed_point_does_not_end_a_sweep_that_was_cut(here, monkeypatch):
    """What was never tried comes first, then what failed, which alone fails the step."""
    points = [Point(1024 * n, 1, arm="tp", form="staged", world=1) for n in (1, 2, 3)]
    asked = swept(monkeypatch, here, [["failed"], ["ok"], ["ok"], ["failed"], ["ok"], ["ok"], []])
    with pytest.raises(kit_state.Cut, match="0 of 3 Points measured, 2 to come, 1 failed"):
        kit_steps._sweep(here, points, 60)
    with pytest.raises(kit_state.Cut, match="1 of 3 Points measured, 1 to come, 1 failed"):
        kit_steps._sweep(here, points, 60)
    with pytest.raises(RuntimeError, match="2 of 3 Points measured; .*wrong ids"):
        kit_steps._sweep(here, points, 60)
    with pytest.raises(RuntimeError, match="wrong ids"):
        kit_steps._sweep(here, points, 60)
    assert kit_steps._sweep(here, points, 60) == ["3 of 3 Points measured"] == kit_steps._sweep(here, points, 60)
    more = [points[0].replace(context_tokens=4096), points[0].replace(context_tokens=5120)]
    for _ in range(2):  # a time too short for even one Point finishes nothing
        with pytest.raises(kit_state.Cut, match="1 of 2 Points measured, 1 to come"):
            kit_steps._sweep(here, more, 60)
    assert [given for given, _ in asked[:5]] == [points, points[1:], points[2:], points[:1], points[:1]]


def test_a_step_that_was_often_cut_is_not_given_up(here):
    """Two deaths running give a step up; ends by its own will in between do not count."""
    step = replace(next(s for s in STEPS if s.name == "targets"), limit_s=5.0, usual_s=0.2)
    state = kit_state.State.load(here, "node")
    cut, dies = ["sh", "-c", f"exit {kit.CUT_STATUS}"], ["sh", "-c", "sleep 9"]
    for command, expected in ((cut, CUT), (cut, CUT), (dies, CUT), (cut, CUT), (dies, CUT), (dies, FAILED)):
        assert kit.take(step, state, here, 0.3, command, lambda words: None).status == expected


def test_aiters_selector_polls_only_memory_that_passed_the_ping_pong(here, monkeypatch):
    monkeypatch.setattr(aiter_arm, "missing_cp", lambda: "")
    for grains in ([], ["fine-grained", pingpong.COARSE]):
        kit_state.write(here / "pingpong.json", {"pairs": [{"grain": g} for g in grains]})
        assert kit.run_step("aiter_cp", here, 60) == kit.LEFT_OUT_STATUS
    asked = []
    monkeypatch.setattr(aiter_arm, "run", lambda *given, **options: asked.append((given, options)) or {"arms": []})
    kit_state.write(here / "pingpong.json", {"pairs": [{"grain": "fine-grained"}]})
    assert kit.run_step("aiter_cp", here, 60) == 0 and asked == [(("cuda", 4), {"between": True})]
    names = [s.name for s in STEPS if not s.always]
    assert names[-1] == "aiter_cp", "waits without a bound come last"


def test_an_error_of_many_lines_is_named_in_one():
    text = kit._shortened("NotebookFailed: 30.ipynb: PapermillExecutionError:\n" + "-" * 3000 + "\nTypeError: isfinite\n")
    assert text.splitlines()[0] == "NotebookFailed: 30.ipynb: PapermillExecutionError: TypeError: isfinite" and len(text) <= 1500
    assert kit._shortened("ValueError: x\ny") == "ValueError: x\ny"


def test_kernels_are_compiled_before_what_needs_them_and_a_failure_is_said(here, monkeypatch):
    asked = []
    monkeypatch.setattr(compiled, "ahead", lambda points, seconds: asked.extend(points) or (18, ["exit status 1: no ptxas"]))
    assert kit.run_step("kernels", here, 60) == 1 and "no ptxas" in kit_state.read(here / "said" / "kernels.json")["why"]
    assert set(asked) >= {*trust.points("one_launch", 4), *trust.points("two_launch", 4), *kit_steps.target_points(kit_steps.facts(here))}
    names = [s.name for s in STEPS]
    assert names.index("kernels") < names.index("engines") < names.index("stress_two_launch")


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """The kit on this machine's CPU with real steps and ranks, as far as seconds go."""
    run = tmp_path_factory.mktemp("rehearsal")
    names = ["doctor", "stress_one_launch", "targets", "fit", "policy", "page"]
    return run, kit.main("node", run, only=names, device="cpu", commit="c0ffee"), kit_state.State.of(kit_state.read(run / kit_state.STATE_FILE))


def test_a_rehearsal_measures_and_decides(rehearsed):
    run, status, state = rehearsed
    assert status == 0, [(n, r.why) for n, r in state.steps.items()]
    assert {n: r.status for n, r in state.steps.items()} == {n: LEFT_OUT if n == "stress_one_launch" else DONE for n in state.steps}
    assert state.steps["stress_one_launch"].why == "needs GPUs, this is a CPU"
    rows = records.load(run)
    assert {r.status for r in rows} == {"ok"} and {r.point.arm for r in rows} == {"tp", "cp", "page_read"}


@pytest.mark.slow
def test_the_kit_runs_whole_on_a_cpu(tmp_path):
    status = kit.main("node", tmp_path, device="cpu", minutes=20)
    state = kit_state.State.of(kit_state.read(tmp_path / kit_state.STATE_FILE))
    assert status == 0, [(n, r.why) for n, r in state.steps.items() if r.status == FAILED]
    gpu_only = {"kernels", "engines", "aiter", "aiter_cp", "stress_two_launch", "stress_one_launch", "published_cold"}
    assert {n: r.status for n, r in state.steps.items()} == {s.name: LEFT_OUT if s.name in gpu_only else DONE for s in STEPS}
    assert all("CPU" in state.steps[name].why for name in gpu_only)
    for folder, init in ((tmp_path, 0), (tmp_path / kit_state.PUBLISHED, 1)):
        assert {r.point.shape.init_blocks for r in records.load(folder)} == {init}


def test_its_archive_holds_everything(rehearsed):
    run, _, _ = rehearsed
    with tarfile.open(run / "node.tar.gz") as tar:
        names = set(tar.getnames())
        members = tar.getmembers()
    wanted = ("rows.jsonl", "provenance.json", "doctor.txt", "kit.json", "facts.json", "policy_cp.json", "index.html", "logs/targets.log")
    assert {f"node/{name}" for name in wanted} <= names
    assert any(name.startswith("node/figures/map") for name in names)
    assert all(m.uname == m.gname == "" and m.uid == 0 for m in members)


def test_its_page_stands_alone_and_says_every_step(rehearsed):
    run, _, state = rehearsed
    text = (run / "index.html").read_text()
    assert "data:image/svg+xml" in text and not re.search(r"<(script|link)\b|src='http", text)
    for step in STEPS:
        assert (f"<td>{html.escape(step.title)}</td>" in text) == (step.name in state.steps and step.name != "page")
    assert re.search(r"commit c0ffee; python [\d.]+, torch \d.*, triton \d.*; begun 20\d\d-", text), "whose figures these are"
    assert "needs GPUs, this is a CPU" in text and "<h2>Break-even, measured</h2>" in text


def test_running_it_again_measures_nothing_again(rehearsed):
    run, _, _ = rehearsed
    before = (run / "rows.jsonl").read_bytes()
    kit.main("node", run, only=["targets", "page"])
    assert (run / "rows.jsonl").read_bytes() == before
