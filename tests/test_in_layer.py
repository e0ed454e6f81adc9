"""Calls inside a layer: what is timed and in which order, who waits for whom, and what the figures charge."""

import json
from dataclasses import asdict
from pathlib import Path

import drivers
import pytest
import torch

from m3cp import in_layer, worker
from m3cp.in_layer import Timed
from m3cp.kernels import page_read
from m3cp.shapes import Point

LATE_US = 40_000.0
TP = Point(8192, 8, arm="tp", form="one_launch", world=2)
CP = TP.replace(arm="cp", exchange="symmetric", queries="gathered")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two ranks over gloo, one shape, the last rank on time and 40 ms late: what the command wrote."""
    out = tmp_path_factory.mktemp("in_layer") / "in_layer.json"
    with drivers.forked():
        assert in_layer.main("cpu", shapes=[(576, 2)], skews_us=(0.0, LATE_US), rounds=3, out=out) == 0
    return json.loads(out.read_text())


def test_every_path_is_checked_and_timed_at_every_skew(run):
    found = [Timed(**{k: v for k, v in t.items() if k != "figures"}) for t in run["points"]]
    assert [(t.point["arm"], t.point["queries"], t.skew_us) for t in found] == [
        (arm, queries, us) for arm, queries in (("tp", None), ("cp", "gathered"), ("cp", "replicated")) for us in (0.0, LATE_US)
    ]
    for t in found:
        assert t.check["passed"] and t.check["mismatches"] == 0 and t.check["rows"] >= 5 * t.layers * 4
        assert {len(rank) for kind in (t.layer_us, t.bare_us, t.alone_us) for rank in kind} == {3} and len(t.layer_us) == 2
    assert run["ranks"] == 2 and run["late_rank"] == 1 and {"code_hash", "commit", "versions"} <= set(run["provenance"])


def test_cp_waits_for_the_late_rank_and_tp_does_not(run):
    """Others load the processor too: what must be little is judged by the lower end of its interval, what must be much by the upper one."""
    for t in run["points"]:
        early, skew, in_layer_us = (t["figures"][name] for name in ("early", "skew", "in_layer"))
        late = t["skew_us"] == LATE_US
        assert skew[2] > LATE_US / 2 if late else skew[1] < LATE_US / 2, "the last rank is late, and by what was asked"
        assert early[2] > LATE_US / 2 if late and t["point"]["arm"] == "cp" else early[1] < LATE_US / 2
        assert in_layer_us[1] < LATE_US * 0.75, "neither path is charged for the skew"


def planted(point, call_us, skew_us=5.0, waits=False):
    """Two ranks of one round each at three levels: 90 and 91 us of weights, the last rank late, a call of `call_us`."""
    rounds = (0.0, 0.25, 0.5)
    bare = [[90 + r for r in rounds], [91 + skew_us + r for r in rounds]]
    layer = [[(bare[1 if waits else 0][i]) + call_us + 0.5 for i in range(3)], [us + call_us for us in bare[1]]]
    return Timed(point.to_dict(), skew_us, 8, {"passed": True}, layer, bare, [[call_us - 1] * 3, [call_us - 1.5] * 3])


def test_the_figure_is_the_slowest_rank_from_the_later_arrival_on():
    tp, cp = in_layer.figures([planted(TP, 9.0), planted(CP, 8.0, waits=True)])
    assert tp["in_layer"] == (9.0, 9.0, 9.0) and tp["alone"] == (8.0, 8.0, 8.0) and tp["early"] == (9.5, 9.5, 9.5)
    assert cp["in_layer"] == (8.5, 8.5, 8.5), "its early rank ends last"
    assert cp["early"] == (14.5, 14.5, 14.5) and cp["skew"] == (6.0, 6.0, 6.0), "the wait shows on the early rank"
    assert cp["over_tp"] == (-0.5, -0.5, -0.5) and cp["over_tp_alone"] == (-1.0, -1.0, -1.0) and "over_tp" not in tp
    assert tp["bare"] == (96.25, 96.0, 96.5)


def test_cp_is_compared_with_tp_at_its_own_skew_and_shape():
    others = [planted(TP, 9.0, skew_us=20.0), planted(TP.replace(batch=1), 9.0), Timed(TP.to_dict(), 5.0, error="wrong ids")]
    assert "over_tp" not in in_layer.figures([*others, planted(CP, 8.0)])[-1]


def test_the_interval_holds_the_median_and_narrows_with_rounds():
    few, many = (in_layer.interval([100.0 + (i * 7 % 10) for i in range(n)]) for n in (10, 100))
    assert few[1] <= few[0] <= few[2] and 0 < many[2] - many[1] < few[2] - few[1] < 9
    assert in_layer.interval([3.0, 1.0, 2.0])[0] == 2.0


def test_the_table_shows_figures_and_says_why_there_are_none():
    found = [planted(TP, 9.0), planted(CP, 8.0, waits=True), Timed(CP.to_dict(), 20.0, error="rank 1: wrong ids")]
    lines = in_layer.table(found, in_layer.figures(found))
    assert lines[1].split() == "8k, 8 TP 5 6.00 8.00 (8.00 to 8.00) 9.00 (9.00 to 9.00) 9.50 (9.50 to 9.50) - -".split()
    assert lines[2].split()[-12:] == "14.50 (14.50 to 14.50) -1.00 (-1.00 to -1.00) -0.50 (-0.50 to -0.50)".split()
    assert lines[3].startswith("8k, 8          CP gathered       20 rank 1: wrong ids")


@pytest.fixture
def place(tmp_path):
    return worker.Place(worker.Peers(0, 1, tmp_path), torch.device("cpu"), None, 1 << 20, None)


def test_a_layer_reads_then_waits_then_calls_and_only_the_last_rank_waits(place, monkeypatch):
    layer, done = in_layer.Layer(place, 1 << 16, (0.0, 5.0)), []
    monkeypatch.setattr(layer, "read", lambda number: done.append(("read", number)))
    monkeypatch.setattr(layer, "wait", lambda us: done.append(("wait", us)))
    calls = [lambda: done.append("a"), None, lambda: done.append("c")]

    def run(skew_us):
        done.clear()
        for step in layer.steps(skew_us, calls):
            step()
        return list(done)

    assert layer.late, "one rank is the last one"
    assert run(5.0) == [("read", 0), ("wait", 5.0), "a", ("read", 1), ("wait", 5.0), ("read", 2), ("wait", 5.0), "c"]
    on_time = [("read", 0), "a", ("read", 1), ("read", 2), "c"]
    assert run(0.0) == on_time
    layer.late = False
    assert run(5.0) == on_time


def test_a_read_that_misses_bytes_is_refused(place, monkeypatch):
    read = page_read.page_read
    monkeypatch.setattr(page_read, "page_read", lambda cache, pages, out, **given: read(cache, pages[:-1], out, **given))
    with pytest.raises(RuntimeError, match="read of 65536 bytes did not read them all"):
        in_layer.Layer(place, 1 << 16, ())


def test_wrong_ids_get_no_time(place, monkeypatch, tmp_path):
    tp = in_layer.points("cpu", 1, [(576, 2)])[0]
    made = worker.Expected

    def wrong(*given):
        expected = made(*given)
        expected.ids[0][0, 0, 0] += 1
        return expected

    monkeypatch.setattr(worker, "Expected", wrong)
    in_layer.body(place, {"points": [tp.to_dict()], "skews_us": [0.0], "weight_bytes": 1 << 16, "rounds": 3, "scratch": str(tmp_path)})
    (found,) = [Timed(**t) for t in json.loads((tmp_path / "result.json").read_text())]
    assert "wrong answer: " in found.error and not found.layer_us and found.point == tp.to_dict()


def test_weights_are_one_tokens_share_of_an_m3_layer():
    projections, expert = 111_673_344, 113_246_208  # 6144 x (4992 + 4096) x 2 bytes of 2 ranks; 3 x 6144 x 3072 x 2 bytes whole
    assert in_layer.weight_bytes(TP) == projections + 5 * expert // 2
    assert in_layer.weight_bytes(TP) > 6 * 62_914_560, "far more than an H200's L2"


def test_points_on_gpus_are_six_captured_ones_with_cold_caches():
    found = in_layer.points("cuda", 2, in_layer.SHAPES["cuda"])
    assert len(set(found)) == 6 and {(p.form, p.launch, p.cache, p.world) for p in found} == {("one_launch", "graph", "cold", 2)}
    assert [(p.arm, p.queries) for p in found[:3]] == [("tp", None), ("cp", "gathered"), ("cp", "replicated")]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path, written, write_text = tmp_path / "new" / "found.json", [], Path.write_text

    def torn(self, text):
        written.append(self)
        write_text(self, text[: len(text) // len(written)])
        if len(written) > 1:
            raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", torn)
    in_layer.write(path, {"points": [asdict(planted(TP, 9.0))]})
    whole = path.read_text()
    assert json.loads(whole)["points"][0]["skew_us"] == 5.0
    with pytest.raises(OSError, match="no space"):
        in_layer.write(path, {"points": []})
    assert path.read_text() == whole and path not in written


@pytest.mark.parametrize(
    "given, words",
    [
        (dict(ranks=1), "ranks=1: must be 2, 4 or 8"),
        (dict(skews_us=(-1.0,)), r"skews_us=\[-1.0\]: must be different waits of 0 to 100000 us"),
        (dict(skews_us=(5.0, 5.0)), "skews_us="),
        (dict(rounds=2), "rounds=2: must be 3 or more"),
        (dict(weights=100), "weights=100: must be at least 32768 bytes"),
        (dict(shapes=[(576, 2), (576, 2)]), "shapes=.*: must be different"),
        (dict(shapes=[(4096, 2)]), "context_tokens=4096: must be 1 to max_context=1024 tokens"),
    ],
)
def test_bad_arguments_are_refused_by_name(given, words):
    with pytest.raises(ValueError, match=words):
        in_layer.main("cpu", **given)
