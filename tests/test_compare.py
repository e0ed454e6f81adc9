"""Comparing runs: words that intervals earn, differences that are refused by name, a figure and an exit status."""

import dataclasses

import numpy as np
import pytest
import synthetic
from typer.testing import CliRunner

from m3cp import cli, compare, records
from m3cp.shapes import IndexerShape


def runs(scale=1.0, seed=1, jitter=0.004, **changes):
    made = synthetic.rows(contexts=(8192, 32768), batches=(1, 8), seed=seed, jitter=jitter, **changes)
    times = lambda row: {  # noqa: E731
        "samples_us": [s * scale for s in row.samples_us],
        "rank_samples_us": [[s * scale for s in rank] for rank in row.rank_samples_us],
    }
    return [dataclasses.replace(row, **times(row)) for row in made]


@pytest.mark.parametrize(
    ("low", "high", "expect"),
    [(0.98, 1.02, "SAME"), (0.975, 0.99, "SAME"), (0.9, 0.96, "FASTER"), (0.95, 0.98, "FASTER"), (1.01, 1.05, "SLOWER"),
     (1.2, 1.3, "SLOWER"), (0.9, 1.1, "UNDECIDED"), (0.95, 1.01, "UNDECIDED"), (0.99, 1.2, "UNDECIDED")],
)  # fmt: skip
def test_words(low, high, expect):
    assert compare.word(low, high) == expect


@pytest.mark.parametrize(("scale", "expect"), [(1.0, "SAME"), (0.8, "FASTER"), (1.25, "SLOWER")])
def test_a_planted_change_is_found(scale, expect):
    verdicts = compare.compare(runs(seed=1), runs(scale, seed=2))
    assert {v.word for v in verdicts} == {expect} and len(verdicts) == 8
    for v in verdicts:
        assert v.low <= v.ratio <= v.high and v.ratio == pytest.approx(scale, rel=0.02)
        assert v.ratio == pytest.approx(v.b_us / v.a_us)


def test_noise_is_undecided_and_intervals_cover():
    noisy = compare.compare(runs(seed=1, jitter=0.3), runs(1.02, seed=2, jitter=0.3))
    assert {v.word for v in noisy} == {"UNDECIDED"}
    random, inside = np.random.default_rng(0), 0
    row = runs()[0]
    for _ in range(300):
        a, b = (dataclasses.replace(row, samples_us=list(random.normal(10, 0.5, 25))) for _ in range(2))
        _, low, high = compare.interval([a], [b])
        inside += low <= 1 <= high
    assert 0.9 <= inside / 300 <= 0.995


def test_spread_between_processes_and_drift_widen_the_interval():
    a, b = runs(seed=1)[0], runs(seed=2)[0]
    again = dataclasses.replace(b, process=1, samples_us=[s * 1.2 for s in b.samples_us])
    narrow, wide = compare.interval([a], [b]), compare.interval([a], [b, again])
    assert wide[2] - wide[1] > 3 * (narrow[2] - narrow[1])
    shaken = compare.interval([a], [dataclasses.replace(b, unsteady=True, probe_drift=-0.1)])
    assert shaken[1:] == pytest.approx((narrow[1] / 1.1, narrow[2] * 1.1))


PROVENANCE = {"clocks": [{"sm_mhz": 1980, "memory_mhz": 3201}], "environment": {"NCCL_NVLS_ENABLE": "0", "HOME": "a"}}


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("shape", lambda r: {"point": r.point.replace(shape=IndexerShape(topk=8))}),
        ("cache_state", lambda r: {"cache_state": "warm", "point": r.point.replace(cache="warm")}),
        ("timed_region", lambda r: {"timed_region": [*r.timed_region, "attention"]}),
        ("clocks", lambda r: {"provenance": {**PROVENANCE, "clocks": [{"sm_mhz": 1500, "memory_mhz": 3201}]}}),
        ("variables", lambda r: {"provenance": {**PROVENANCE, "environment": {"NCCL_NVLS_ENABLE": "1"}}}),
    ],
)
def test_other_experiments_are_refused_unless_named(field, change):
    a = [dataclasses.replace(r, provenance=PROVENANCE) for r in runs()]
    b = [dataclasses.replace(r, **{"provenance": PROVENANCE, **change(r)}) for r in runs(seed=2)]
    with pytest.raises(ValueError, match=rf"- {field} \(8 pairs\), first tp/staged 8k x1.*(.|\n)*--across {field}$"):
        compare.compare(a, b)
    assert {v.word for v in compare.compare(a, b, [field])} == {"SAME"}
    with pytest.raises(ValueError, match="--across='weather': must be among shape"):
        compare.compare(a, b, ["weather"])


def test_little_differences_of_clocks_and_other_variables_do_not_matter():
    a = [dataclasses.replace(r, provenance=PROVENANCE) for r in runs()]
    near = {"clocks": [{"sm_mhz": 1965, "memory_mhz": 3201}], "environment": {"NCCL_NVLS_ENABLE": "0", "HOME": "b"}}
    assert compare.compare(a, [dataclasses.replace(r, provenance=near) for r in runs(seed=2)])


def test_runs_without_a_common_point_are_refused():
    with pytest.raises(ValueError, match="no Point has a time in both runs"):
        compare.compare(runs(), synthetic.rows(contexts=(1024,), batches=(64,)))


def test_the_newest_row_of_a_process_counts():
    a, old, new = runs(seed=1)[0], runs(2.0, seed=2)[0], runs(seed=3)[0]
    (verdict,) = compare.compare([a], [old, new])
    assert verdict.word == "SAME" and verdict.processes == (1, 1)


@pytest.mark.parametrize(("scale", "words", "status"), [(1.0, [], 0), (1.25, [], 1), (0.8, [], 0)])
def test_a_gate(tmp_path, scale, words, status):
    for name, rows in (("before", runs(seed=1)), ("after", runs(scale, seed=2))):
        for row in rows:
            records.append(tmp_path / name, row)
    given = ["compare", str(tmp_path / "before"), str(tmp_path / "after"), "--figures", str(tmp_path / "figures"), *words]
    done = CliRunner().invoke(cli.app, given)
    assert done.exit_code == status, done.output
    assert "8 SLOWER" in done.output if status else "0 SLOWER" in done.output
    assert (tmp_path / "figures" / "compare_before_after.png").stat().st_size > 10_000
    refused = CliRunner().invoke(cli.app, ["compare", str(tmp_path / "before"), str(tmp_path / "nowhere")])
    assert refused.exit_code == 2 and "nowhere" in refused.output


def test_undecided_fails_only_where_asked(tmp_path):
    for name, rows in (("before", runs(seed=1, jitter=0.3)), ("after", runs(seed=2, jitter=0.3))):
        for row in rows:
            records.append(tmp_path / name, row)
    given = ["compare", str(tmp_path / "before"), str(tmp_path / "after"), "--figures", str(tmp_path)]
    assert CliRunner().invoke(cli.app, given).exit_code == 0
    assert CliRunner().invoke(cli.app, [*given, "--strict"]).exit_code == 1
