"""Engines' kernels as arms: found or skipped in words, glue around them, ties, launch settings, rows."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import drivers
import pytest
import torch
from problems import build
from test_doctor import LAPTOP, TWO_H200

from m3cp import doctor, engine_kernels, records, reference, sweep
from m3cp import grid as planning
from m3cp.shapes import IndexerShape, Point
from m3cp.shard import Shard

ROOT = Path(__file__).resolve().parents[1]
CP = dict(exchange="collective", queries="gathered")


@pytest.fixture
def clean_imports(monkeypatch):
    """No engine importable, whatever this machine has; what a test installs goes away."""
    for name in [n for n in sys.modules if n.split(".")[0] in ("vllm", "sglang")]:
        monkeypatch.delitem(sys.modules, name)
    path = sys.path[:]
    sys.path[:] = [p for p in path if not any((Path(p) / n).exists() for n in ("vllm", "sglang"))]
    engine_kernels.missing.cache_clear()
    yield
    sys.path[:] = path
    for name in [n for n in sys.modules if n.split(".")[0] in ("vllm", "sglang")]:
        del sys.modules[name]
    engine_kernels.missing.cache_clear()


@pytest.fixture
def stand_ins(clean_imports):
    import engine_stand_ins

    engine_stand_ins.calls.clear()
    engine_stand_ins.install()
    return engine_stand_ins


def test_what_is_missing_is_named_by_its_import(clean_imports, tmp_path):
    assert engine_kernels.missing("vllm_tp") == (
        "import vllm.models.minimax_m3.common.ops.index_topk: ModuleNotFoundError: No module named 'vllm'"
    )
    assert "No module named 'sglang'" in engine_kernels.missing("sglang_cp")
    # An engine that is there, but breaks on import: a file of it is named, its path is not.
    module = tmp_path.joinpath(*engine_kernels.MODULES["sglang_cp"][0].split(".")).with_suffix(".py")
    module.parent.mkdir(parents=True)
    module.write_text("raise RuntimeError('cannot load /opt/somewhere/libx.so')")
    sys.path.insert(0, str(tmp_path))
    engine_kernels.missing.cache_clear()
    assert engine_kernels.missing("sglang_cp").endswith("indexer_cp: RuntimeError: cannot load <path>")


@pytest.mark.parametrize(
    "change, says",
    [
        (dict(arm="sglang_cp", world=2, **CP), "they take the world size for the head count, and world=2 with 4 heads"),
        (dict(arm="sglang_cp", world=4, query_len=4, **CP), "query_len 1"),
        (dict(arm="sglang_cp", world=4, max_context=2**22, **CP), "max_context of at most 16384 blocks, not 32768"),
        (dict(arm="vllm_cp", world=2, dtype="fp8_e4m3fn", **CP), "a cache of bf16, not fp8_e4m3fn"),
        (dict(arm="vllm_tp", shape=IndexerShape(block_size=64)), "block_size 128 and head_dim 128, not 64 and 128"),
        (dict(arm="vllm_tp", shape=IndexerShape(init_blocks=9, local_blocks=9)), "at most topk=16 forced blocks, not 18"),
        (dict(arm="sglang_tp"), "only published figures carry it"),
        (dict(arm="sglang_cp", world=4, **CP), None),
        (dict(arm="vllm_cp", world=2, **CP), None),
        (dict(arm="vllm_tp", world=8, dtype="fp8_e4m3fn", query_len=4), None),
    ],
)
def test_what_the_kernels_cannot_run_is_refused_in_words(change, says):
    reason = engine_kernels.refusal(Point(1024, 1, **change))
    assert (says is None) == (reason is None) and (says or "") in (reason or "")


@pytest.mark.parametrize(
    "change, named",
    [
        (dict(arm="vllm_tp", form="staged"), "form='staged': must be None"),
        (dict(arm="vllm_tp", queries="gathered"), "queries='gathered': must be None"),
        (dict(arm="vllm_cp", exchange="collective"), "queries=None: must be one of"),
        (dict(arm="vllm_cp", exchange="symmetric", queries="replicated"), "queries='replicated': must be 'gathered'"),
        (dict(arm="sglang_cp", queries="gathered"), "exchange=None: must be one of"),
        (dict(arm="vllm_cp", form="one_launch", **CP), "form='one_launch': must be None"),
    ],
)
def test_fields_that_an_engine_does_not_use_are_none(change, named):
    with pytest.raises(ValueError, match=named):
        Point(1024, 1, world=2, **change)


def test_a_grid_names_engines_arms_and_a_plan_skips_them_in_words(clean_imports):
    axes = {"worlds": [1, 2], "contexts": [8192], "batches": [1], "arms": ["vllm_tp", "vllm_cp", "sglang_cp"]}
    points = planning.expand({**axes, "exchanges": ["collective", "symmetric"]}, device="cuda")
    assert [(p.arm, p.world, p.exchange) for p in points] == [
        ("vllm_tp", 1, None),
        ("vllm_tp", 2, None),
        *((arm, 2, exchange) for arm in ("vllm_cp", "sglang_cp") for exchange in ("collective", "symmetric")),
    ]
    plan = planning.make_plan(points, device="cuda", ranks=2)
    assert not plan.groups and len(plan.skipped) == len(points)
    for point, reason in plan.skipped.items():
        wanted = "head count" if point.arm == "sglang_cp" else "not importable here: import vllm."
        assert wanted in reason and repr(point.arm) in reason
    assert "need a GPU" in planning.make_plan(points[:1], device="cpu", ranks=2).skipped[points[0]]


def test_a_plan_holds_engines_that_import_and_fit(stand_ins):
    points = [Point(8192, 1, arm="vllm_cp", world=w, max_context=8192, **CP) for w in (1, 2, 4)]
    plan = planning.make_plan(points, device="cuda", ranks=2)
    assert plan.points == [points[1]] and "4 GPUs" in plan.skipped[points[2]] and "nobody" in plan.skipped[points[0]]


def test_the_doctor_says_which_engines_import():
    engines = (("vllm_tp", ""), ("sglang_cp", "import sglang.x: ModuleNotFoundError: No module named 'sglang'"))
    plan = {p.what: p for p in doctor.plan(replace(TWO_H200, engines=engines))}
    assert plan["vllm_tp"].measured and not plan["sglang_cp"].measured and "No module named" in plan["sglang_cp"].why
    laptop = {p.what: p for p in doctor.plan(replace(LAPTOP, engines=engines))}
    assert not laptop["vllm_tp"].measured and "need a GPU (they import here)" in laptop["vllm_tp"].why
    assert {arm for arm, _ in doctor.engines()} == set(engine_kernels.MODULES)


def test_labels_say_what_a_row_is_made_of():
    named = {e: engine_kernels.label(Point(1024, 1, arm="vllm_cp", world=2, exchange=e, queries="gathered")) for e in ("collective", "symmetric")}
    assert named == {"collective": "vLLM kernels, NCCL, our glue", "symmetric": "vLLM kernels, our symmetric gather, our glue"}
    assert engine_kernels.label(Point(1024, 1, arm="vllm_tp")) == "vLLM kernels, our buffers"


# The comparison.


def compared(problem, got):
    expect = reference.select_blocks(*problem.tensors, shape=problem.shape, query_len=problem.query_len)
    return engine_kernels.same_up_to_ties(
        got, expect, *problem.tensors, shape=problem.shape, query_len=problem.query_len, heads=range(problem.shape.heads)
    )  # fmt: skip


def test_ties_may_go_either_way_and_nothing_else_may():
    problem = build(IndexerShape(), [128 * 40, 0, 128 * 30 + 5], kind="ties", seed=2)
    expect = reference.select_blocks(*problem.tensors, shape=problem.shape)
    right, tied = compared(problem, expect.flip(-1))  # the order of ids is the engine's
    assert bool(right.all()) and not bool(tied.any())
    scores = reference.score(*problem.tensors, shape=problem.shape, shard=Shard(0, 1, 4), query_len=1, max_context=128 * 40)[0, 0]
    chosen = expect[0, 0].tolist()
    free = [b for b in range(39) if b not in chosen]
    # (chosen, free) blocks of one score: the lowest of those chosen blocks that some block left out equals.
    alike = next((c, f) for c in chosen[:-1] for f in free if scores[c] == scores[f])
    better = next(c for c in chosen[:-1] if scores[c] > max(scores[f] for f in free))

    def swap(old, new):
        got = expect.clone()
        got[0, 0][got[0, 0] == old] = new
        right, tied = compared(problem, got)
        assert bool(right[1:].all()) and bool(right[:, 1:].all())
        return bool(right[0, 0]), bool(tied[0, 0])

    assert swap(*alike) == (True, True)
    assert swap(better, free[0]) == (False, False)
    assert swap(alike[0], chosen[1] if alike[0] != chosen[1] else chosen[0]) == (False, False)  # twice the same block
    assert swap(39, free[0]) == (False, False)  # the forced block
    assert swap(alike[0], -1) == (False, False) and swap(alike[0], 10_000) == (False, False)


# The glue, around stand-ins.


@pytest.mark.parametrize("world, heads, query_len", [(1, 4, 1), (2, 4, 4), (4, 4, 1), (4, 2, 1), (2, 1, 4)])
def test_vllm_arms_choose_as_the_reference(stand_ins, world, heads, query_len):
    problem = build(IndexerShape(heads=heads), [128 * 37 + 3, 0, 300, 128 * 21], query_len, page_slots=1, seed=heads + world)
    bounds, shards = problem.bounds(), [Shard(r, world, heads) for r in range(world)]
    cp = [engine_kernels.VllmCP(problem.shape, s, **bounds) for s in shards]
    everyone = torch.stack([problem.heads(s.owned_heads) for s in shards])
    expect = reference.select_blocks(*problem.tensors, shape=problem.shape, query_len=query_len)
    given = problem.tensors[1:]
    found = torch.stack([x.local_keys(x.ordered(everyone), *given, query_len).clone() for x in cp])
    tp = [engine_kernels.VllmTP(problem.shape, s, **bounds) for s in shards]
    for shard, a, b in zip(shards, cp, tp, strict=True):
        out = torch.full((shard.local_heads, problem.tokens, 16), -7, dtype=torch.int32)
        a.merge(found, problem.seq_lens, query_len, out)
        for got in (out, b(problem.heads(shard.owned_heads), *given, query_len=query_len)):
            right, _ = engine_kernels.same_up_to_ties(
                got, expect[shard.owned_heads.start : shard.owned_heads.stop], *problem.tensors,
                shape=problem.shape, query_len=query_len, heads=shard.owned_heads,
            )  # fmt: skip
            assert bool(right.all())


def test_wrong_arguments_are_named(stand_ins):
    problem = build(IndexerShape(), [3000], page_slots=1)
    x = engine_kernels.VllmTP(problem.shape, Shard(0, 2, 4), **problem.bounds())
    with pytest.raises(ValueError, match=r"q.shape=\(1, 4, 128\): must be \[tokens, local heads, head_dim\] = \[1, 2, 128\]"):
        x(*problem.tensors)
    with pytest.raises(ValueError, match="out.shape"):
        x(problem.heads(range(2)), *problem.tensors[1:], out=torch.empty(4, 1, 16, dtype=torch.int32))


def test_a_setting_holds_for_one_call(stand_ins):
    tp, scoring, exchanging = (sys.modules[n] for arm in ("vllm_tp", "vllm_cp") for n in engine_kernels.MODULES[arm])
    seen = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **named: seen.append((grid, args, named))

    tp._decode_index_score_kernel = kernel = Kernel()
    setting = engine_kernels.Setting("s", {"DECODE_TOPK_TILE": 7}, {"_decode_index_score_kernel": {"num_warps": 8, "num_kv_chunks": 16}})
    with pytest.raises(KeyError), engine_kernels.using((tp, exchanging), setting):
        assert exchanging.DECODE_TOPK_TILE == 7
        tp._decode_index_score_kernel[(3, 256)](1, num_warps=4, num_kv_chunks=256, USE=1)
        raise KeyError
    assert exchanging.DECODE_TOPK_TILE == 512 and tp._decode_index_score_kernel is kernel
    assert seen == [((3, 16), (1,), {"num_warps": 8, "num_kv_chunks": 16, "USE": 1})]
    with pytest.raises(AttributeError, match="DECODE_TOPK_TILE is in none of"), engine_kernels.using((scoring,), setting):
        pass


# Rows, from two real ranks over gloo around the stand-ins.

BODY = f"""
import os, sys, time, types
sys.path.insert(0, {str(ROOT / "tests")!r})
import engine_stand_ins
from m3cp import timing, worker
made = engine_stand_ins.install()

class Graph:
    '''A captured graph's stand-in: replaying is calling.'''
    def __init__(self, calls):
        self.calls = calls
    def replay(self):
        for call in self.calls:
            call()
    def reset(self):
        pass

class Timer:
    def start(self):
        self.began = time.perf_counter()
    def stop(self):
        return (time.perf_counter() - self.began) * 1e6

timing.capture, timing.DeviceTimer = (lambda calls, evict=None: Graph(calls)), Timer
timing.WARM_CALLS, replays = 1, timing.timed_replays
timing.timed_replays = lambda replay, **given: replays(replay, **(given | dict(replays=1)))
worker.Place.hold = lambda self: None
exchanging, keys = made[2], made[2].local_topk_keys
def slow_but_for_256(*args, **named):  # so that one setting is the fastest
    time.sleep(0.0 if exchanging.DECODE_TOPK_TILE == 256 else 0.03)
    return keys(*args, **named)
exchanging.local_topk_keys = slow_but_for_256
worker.main(sys.argv[1:])
"""


def test_rows_of_engines_arms(tmp_path):
    common = dict(world=2, max_context=2304, cache="warm", launch="graph", shape=IndexerShape(heads=2))
    points = [Point(2300, 2, arm="vllm_tp", **common)]
    points += [Point(2300, 2, arm="vllm_cp", exchange=e, queries="gathered", **common) for e in ("collective", "symmetric")]
    (tmp_path / "worker.py").write_text(BODY)
    facts = {**sweep.job_facts("cpu"), "out": str(tmp_path / "out"), "seconds": None, "provenance": {}}
    group = {"points": [p.to_dict() for p in points], "record": [True] * 3}
    with drivers.forked():
        sweep.launch(str(tmp_path / "worker.py"), {**facts, "groups": [group]}, 2)
    rows = records.load(tmp_path / "out")
    assert [r.point for r in rows] == points and {r.status for r in rows} == {"ok"}, [r.error for r in rows]
    for row in rows:
        assert row.path == row.point.arm and row.check["passed"] and row.check["against"] == "reference, ties in any order"
        assert row.extra["setting"] == "the engine's own" and row.extra["engine"] == engine_kernels.label(row.point)
        assert set(row.extra["settings_us"]) == {s.name for s in engine_kernels.SETTINGS[row.point.arm]}
        assert all(isinstance(us, float) for us in row.extra["settings_us"].values())
        assert set(row.extra["kernel_files"]) == set(engine_kernels.MODULES[row.point.arm])
    tp, nccl, symmetric = rows
    assert tp.extra["topk_tuned"] == "a tile" and (tp.launches, tp.collectives) == (3, 0)
    assert (nccl.launches, nccl.collectives, symmetric.launches, symmetric.collectives) == (4, 2, 6, 0)
    for row in (nccl, symmetric):
        best = row.extra["best"]
        assert best["setting"] == "top-k tile of 256, 4 warps" and best["check"]["passed"]
        assert best["median_us"] < row.median_us and len(best["samples_us"]) == len(row.samples_us)


def test_engines_that_are_here_compile_for_a_gpu_that_is_not():
    """The engines' score kernels for sm_90, as their launchers call them; needs the engines, not a GPU."""
    for arm in ("vllm_tp", "vllm_cp", "sglang_cp"):
        if engine_kernels.missing(arm):
            pytest.skip(f"arm {arm!r}: {engine_kernels.missing(arm)}")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("compiles kernels: run without TRITON_INTERPRET")
    from m3cp import compiled

    (tp,), (scoring, _), (sglang,) = ([sys.modules[n] for n in engine_kernels.MODULES[a]] for a in engine_kernels.MODULES)
    forced = dict(head_dim=128, BLOCK_SIZE_K=128, BLOCK_SIZE_Q=1, USE_PDL=True, stride_q_d=1, stride_ik_d=1, stride_s_k=1)
    built = [
        compiled.build(
            tp._decode_index_score_kernel,
            dict(q_ptr="bf16", ik_cache_ptr="bf16", score_ptr="fp32", block_table_ptr="i32", seq_lens="i32"),
            dict(num_idx_heads=2, **forced),
            "sm_90",
        ),
        compiled.build(
            scoring._context_score,
            dict(Q="bf16", Cache="bf16", Table="i32", Lengths="i32", Scores="fp32"),
            dict(Q_TOKEN_STRIDE=512, Q_HEAD_STRIDE=128, HEADS=4, QUERY_LEN=1, RANK=1, WORLD=2, CHUNK=4, N=16, SCALE=0.125),
            "sm_90",
            num_stages=3,
        ),
        compiled.build(sglang._merge_candidates, dict(Gathered="i64", Output="i32"), dict(BATCH=3, WORLD=4, HEAD=1, TOPK=16), "sm_90"),
    ]
    assert [b.spills for b in built] == [0, 0, 0]


def test_importing_the_arms_imports_no_engine():
    code = "import sys, m3cp.engine_kernels; print([n for n in ('vllm', 'sglang') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
