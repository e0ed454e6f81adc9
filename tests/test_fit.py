"""Fits recover what was planted, say what they can't know, and never mix what must not be mixed."""

import dataclasses
import math
import re

import numpy as np
import pandas
import pytest
import synthetic

from m3cp import break_even_lines, crossover, fit, frames, heldout, leastsq, review, terms
from m3cp.shapes import Point

RNG = np.random.default_rng


def line(x, noise, seed=0):
    x = np.asarray(x, dtype=float)
    return (12 + 2e-5 * x) * (1 + noise * RNG(seed).standard_normal(len(x)))


# Cases F01, F02, F05 of real life: units, a parameter at zero, one line through a switch.


def test_f01_units_do_not_matter():
    x = np.geomspace(1e4, 1e8, 25)
    y = line(x, 0.02)
    found = {u: leastsq.solve({"launch": np.ones(25), "bytes": x / u}, y) for u in (1.0, 2.0**20, 16_384.0)}
    base = found[1.0]
    for unit, other in found.items():
        predicted = other.usable @ np.vstack([np.ones(25), x / unit])
        assert predicted == pytest.approx(base.usable @ np.vstack([np.ones(25), x]), rel=1e-6)
        assert other.interval("bytes")[1] / unit == pytest.approx(base.interval("bytes")[1], rel=1e-6)
    assert base.interval("launch")[0] < 12 < base.interval("launch")[1]
    assert base.interval("bytes")[0] < 2e-5 < base.interval("bytes")[1]
    assert base.interval("launch")[1] - base.interval("launch")[0] < 0.5


def test_f01_small_points_count_as_much_as_large_ones():
    x = np.array([1e3, 2e3, 4e3, 1e8, 2e8, 4e8])
    y = 12 + 2e-5 * x
    y[3:] *= [1.05, 0.95, 1.02]  # 100 us of error at the large end must not move the fixed cost
    assert leastsq.solve({"launch": np.ones(6), "bytes": x}, y).value("launch") == pytest.approx(12, rel=0.02)


def test_f01_what_never_varies_is_reported_and_not_invented():
    x = np.geomspace(1e4, 1e8, 12)
    y = line(x, 0.01)
    found = leastsq.solve({"launch": np.ones(12), "bytes": x, "peers": np.full(12, 3.0), "sent": 2 * x + 5}, y)
    assert set(found.unidentified) == {"peers", "sent"}
    assert "launch" in found.unidentified["peers"]
    assert math.isnan(found.value("peers")) and all(map(math.isnan, found.interval("peers")))
    assert found.value("launch") == pytest.approx(12, rel=0.05)
    more = leastsq.solve({"launch": np.ones(2), "bytes": x[:2], "rows": x[:2] ** 2}, y[:2])
    assert "rows" in more.unidentified
    few = leastsq.solve({"launch": np.ones(12), "bytes": x, "rows": x**2}, y, most=2)
    assert few.unidentified == {"rows": "too few rows for another parameter"}


@pytest.mark.parametrize(("c", "sigmas"), [(0.01, (0.00155, 0.00314)), (0.001, (0.000155, 0.000314))])
def test_f02_errors_are_right_where_a_parameter_is_zero(c, sigmas):
    x = np.linspace(-1, 1, 20)
    found = leastsq.solve({"a": np.ones(20), "b": x**2}, x**2 + c * x**3, relative=False, nonnegative=False)
    assert np.sqrt(np.diag(found.covariance)) == pytest.approx(sigmas, rel=0.01)
    assert found.value("a") == pytest.approx(0, abs=1e-12)


def test_f02_a_cost_that_fits_to_zero_has_a_finite_interval_the_right_way_round():
    x = np.geomspace(1e4, 1e8, 15)
    for seed in range(20):
        y = 2e-5 * x * (1 + 0.03 * RNG(seed).standard_normal(15))
        found = leastsq.solve({"launch": np.ones(15), "bytes": x}, y)
        low, high = found.interval("launch")
        assert 0 <= low <= found.value("launch") <= high < 0.1
        assert np.all(np.isfinite(found.covariance))


def switch(n):
    return np.where(n <= 512 * 1024, 11 + 1.8e-5 * n, 9 + 2.3e-5 * n)


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_f05_a_transport_switch_shows_in_the_residuals(noise):
    sizes = np.repeat(2.0 ** np.arange(12, 24), 3)
    y = switch(sizes) * (1 + noise * RNG(1).standard_normal(len(sizes)))
    whole = leastsq.solve({"launch": np.ones(len(sizes)), "sent": sizes}, y)
    assert "residuals follow the size" in leastsq.structure(whole, sizes)
    assert whole.r2 > 0.99 and whole.worst > 0.03  # R² alone would have looked fine
    small = sizes <= 128 * 1024
    part = leastsq.solve({"launch": np.ones(small.sum()), "sent": sizes[small]}, y[small])
    assert leastsq.structure(part, sizes[small]) == ""
    assert part.value("sent") == pytest.approx(1.8e-5, rel=0.02 + 6 * noise)


def test_f05_without_repeats_too_and_not_on_a_clean_line():
    sizes = 2.0 ** np.arange(12, 27, 0.5)
    found = leastsq.solve({"launch": np.ones(len(sizes)), "sent": sizes}, switch(sizes))
    assert "residuals follow the size" in leastsq.structure(found, sizes)
    false = 0
    for seed in range(40):
        clean = leastsq.solve({"launch": np.ones(len(sizes)), "sent": sizes}, line(sizes, 0.02, seed))
        false += bool(leastsq.structure(clean, sizes))
    assert false <= 3


def test_f05_beyond_the_fitted_range_is_marked():
    frame = frames.table(synthetic.rows(contexts=(8192, 16_384, 32_768), batches=(1, 8)))
    model = fit.two_term_fits(frame)[0]
    assert model.predict(model.point(16_384, 4)).extrapolated == ""
    assert "context_tokens=131072 outside 8192 to 32768" in model.predict(model.point(131_072, 4)).extrapolated
    assert "batch=64" in model.predict(model.point(16_384, 64)).extrapolated
    assert "world=4" in model.predict(model.point(16_384, 8, world=4)).extrapolated


# What may meet in a fit or a plot: cases B05 and B06.


def test_b05_ragged_and_uniform_rows_never_share_a_label():
    frame = frames.table(synthetic.rows() + synthetic.rows(mix="one_long_rest_1k") + synthetic.rows(mix="log_uniform"))
    models = fit.two_term_fits(frame)
    assert sorted((m.arm, m.label["mix"]) for m in models) == sorted(
        (a, m) for a in ("tp", "cp") for m in ("uniform", "one_long_rest_1k", "log_uniform")
    )
    tp = frame[frame["arm"] == "tp"]
    with pytest.raises(ValueError, match="mix: log_uniform, one_long_rest_1k, uniform"):
        fit.fit_model(tp)
    with pytest.raises(ValueError, match="imbalance"):
        fit.fit_model(tp, vary=("mix",))
    with pytest.raises(ValueError, match="mix"):
        crossover.break_even_measured(crossover.pairs(frame))


def test_b05_the_published_skewed_row():
    frame = frames.published()
    row = frame[(frame["mix"] == "one_long_rest_1k") & (frame["batch"] == 16)].set_index("arm")["median_us"]
    assert (row["sglang_tp"], row["sglang_cp"]) == (40.76, 27.82)
    names = {c.pairs["mix"].iloc[0]: len(c.pairs) for c in crossover.comparisons(frame, noise=0.05)}
    assert names == {"uniform": 15, "one_long_rest_1k": 2}


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("dtype", {"point": {"dtype": "fp8_e4m3fn"}}),
        ("query_len", {"point": {"query_len": 4}}),
        ("world", {"point": {"world": 4}}),
        ("code_hash", {"provenance": {"code_hash": "other"}}),
        ("node", {"node": "another"}),
        ("region", {"timed_region": ["score"]}),
        ("cache_state", {"cache_state": "warm"}),
    ],
)
def test_b06_one_edited_row_is_rejected_from_the_fit(field, change):
    rows = [r for r in synthetic.rows() if r.point.arm == "tp"]
    change = dict(change)
    if "point" in change:
        change["point"] = dataclasses.replace(rows[3].point, **change["point"])
    rows[3] = dataclasses.replace(rows[3], **change)
    with pytest.raises(ValueError, match=field):
        fit.fit_model(frames.table(rows))
    assert len(frames.groups(frames.table(rows))) == 2


def test_b06_both_arms_the_same_code():
    rows = [dataclasses.replace(r, path="tp") for r in synthetic.rows(contexts=(8192,), batches=(1,))]
    with pytest.raises(ValueError, match="both arms ran path 'tp'"):
        crossover.pairs(frames.table(rows))


def test_timed_regions_with_different_boundaries_do_not_meet():
    rows = synthetic.rows(contexts=(8192,), batches=(1,))
    rows[1] = dataclasses.replace(rows[1], timed_region=[*rows[1].timed_region, "attention"])
    with pytest.raises(ValueError, match="different boundaries"):
        crossover.pairs(frames.table(rows))


def test_rows_that_read_no_key_stay_out_of_slopes():
    rows = synthetic.rows(contexts=(1024, 2048, 8192, 32_768))
    odd = [dataclasses.replace(r, samples_us=[500.0] * 7) if r.bytes_read == 0 else r for r in rows]
    a, b = (fit.two_term_fits(frames.table(r))[0] for r in (rows, odd))
    assert np.array_equal(a.fit.values, b.fit.values) and a.unread == 8 and len(a.fit.residuals) == 8


def test_failed_rows_and_floors_are_no_arms():
    rows = synthetic.rows(contexts=(8192, 32_768))
    failed = dataclasses.replace(rows[0], status="failed", samples_us=[], check={}, error="no")
    floor = synthetic.row(Point(8192, 1, arm="page_read", world=2), 4.0, RNG(0))
    frame = frames.table([*rows, failed, floor])
    assert sorted(m.arm for m in fit.two_term_fits(frame)) == ["cp", "tp"]
    assert len(crossover.pairs(frame)) == 8


def test_a_warm_slope_is_never_called_memory():
    warm = fit.two_term_fits(frames.table(synthetic.rows(cache_state="warm", footprint_over_llc=0.2)))[0]
    cold = fit.two_term_fits(frames.table(synthetic.rows()))[0]
    assert warm.bandwidth_name == "last-level cache" and cold.bandwidth_name == "memory"
    assert "memory" not in " ".join(fit.fit_table([warm])["note"])


def test_a_pair_is_cold_only_where_both_arms_are():
    rows = synthetic.rows(contexts=(8192,), batches=(1,))
    assert set(crossover.pairs(frames.table(rows))["cache_state"]) == {"cold"}
    rows[1] = dataclasses.replace(rows[1], cache_state="warm")
    assert set(crossover.pairs(frames.table(rows))["cache_state"]) == {"warm"}


# Pairs and verdicts.


def test_pairs_meet_their_own_baseline_and_form():
    base = Point(32_768, 8, world=2, form="staged")
    made = [
        synthetic.row(base, 20.0, RNG(0)),
        synthetic.row(dataclasses.replace(base, form="one_launch"), 10.0, RNG(1)),
        synthetic.row(dataclasses.replace(base, arm="cp", exchange="collective", queries="gathered"), 15.0, RNG(2)),
        synthetic.row(
            dataclasses.replace(base, arm="cp", form="one_launch", exchange="symmetric", queries="gathered"),
            9.0,
            RNG(3),
        ),
        synthetic.row(
            dataclasses.replace(base, arm="cp", form="two_launch", exchange="symmetric", queries="gathered"),
            9.5,
            RNG(4),
        ),
        synthetic.row(
            dataclasses.replace(base, arm="vllm_cp", form=None, exchange="collective", queries="gathered"), 9.5, RNG(5)
        ),
    ]
    found = crossover.pairs(frames.table(made)).set_index("form")
    assert set(found.index) == {"staged", "one_launch", "two_launch"}  # vllm_cp has no vllm_tp here
    assert found.loc["staged", "tp_us"] == pytest.approx(20, rel=0.02)
    assert found.loc["one_launch", "tp_us"] == pytest.approx(10, rel=0.02)
    assert found.loc["two_launch", "tp_us"] == pytest.approx(10, rel=0.02)  # no such TP: the fastest one
    assert found.loc["staged", "ratio"] == pytest.approx(20 / 15, rel=0.02)


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (1.1, 1.2, "FASTER"),
        (0.7, 0.9, "SLOWER"),
        (0.9, 1.1, "UNDECIDED"),
        (0.99, 1.01, "SAME"),
        (1.002, 1.01, "SAME"),
        (0.985, 0.999, "SAME"),
    ],
)
def test_verdicts(low, high, word):
    assert crossover.verdict(low, high) == word


def test_ratio_intervals_cover():
    inside = 0
    for seed in range(40):
        rows = synthetic.rows(contexts=(32_768,), batches=(8,), seed=seed, jitter=0.03)
        pair = crossover.pairs(frames.table(rows), seed=seed).iloc[0]
        true = synthetic.truth_us(rows[0].point, synthetic.TP) / synthetic.truth_us(rows[1].point, synthetic.CP)
        inside += pair["ratio_low"] <= true <= pair["ratio_high"]
    assert 33 <= inside <= 40


def test_processes_widen_the_interval():
    rows = synthetic.rows(contexts=(32_768,), batches=(8,), jitter=0.001)
    more = [
        dataclasses.replace(r, process=i, samples_us=[s * f for s in r.samples_us])
        for r in rows
        for i, f in enumerate((0.95, 1.0, 1.06))
    ]
    one, three = (crossover.pairs(frames.table(r)).iloc[0] for r in (rows, more))
    assert three["processes"] == 3
    assert three["ratio_high"] - three["ratio_low"] > 5 * (one["ratio_high"] - one["ratio_low"])


def apart(row, process, us):
    """The row in another process, where its call takes `us` more."""
    return dataclasses.replace(row, process=process, samples_us=[s + us for s in row.samples_us])


def test_what_processes_differ_by_is_in_every_interval_also_of_points_measured_once():
    rng, inside, once, asked = RNG(7), 0, 0, 0
    for seed in range(200):
        rows = synthetic.rows(contexts=(16_384, 24_576, 32_768), batches=(8,), seed=seed, jitter=0.002)
        made = []
        for row in rows:
            again = 1 if row.point.context_tokens == 32_768 else 3
            made += [apart(row, p, rng.normal(0, 0.5) if row.point.arm == "cp" else 0.0) for p in range(again)]
        found = crossover.pairs(frames.table(made), seed=seed)
        for _, pair in found[found["arm"] == "cp"].iterrows():
            points = {r.point.arm: r.point for r in rows if r.point.context_tokens == pair["context_tokens"]}
            true = synthetic.truth_us(points["cp"], synthetic.CP) - synthetic.truth_us(points["tp"], synthetic.TP)
            hit = pair["delta_low"] <= true <= pair["delta_high"]
            assert pair["processes"] == (1 if pair["context_tokens"] == 32_768 else 3)
            inside, asked, once = inside + hit, asked + 1, once + (hit and pair["processes"] == 1)
    assert asked == 600 and 0.93 <= inside / asked < 1 and 0.93 <= once / 200 < 1  # both parts have few degrees of freedom here


def test_a_shift_that_all_points_of_a_sitting_share_is_covered_too():
    rng, inside, asked = RNG(8), 0, 0
    rows = synthetic.rows(contexts=(16_384, 20_480, 24_576, 28_672, 32_768), batches=(8,), jitter=0.0005)
    for seed in range(200):
        shift = rng.normal(0, 0.5, 3)
        made = [at(apart(r, s, shift[s] * (r.point.arm == "cp")), f"2026-11-{20 + s}T10:00:00+00:00") for r in rows for s in range(3)]
        found = crossover.pairs(frames.table(made), draws=200, seed=seed)
        true = [synthetic.truth_us(c.point, synthetic.CP) - synthetic.truth_us(t.point, synthetic.TP) for t, c in zip(rows[::2], rows[1::2], strict=True)]
        inside, asked = inside + int(((found["delta_low"] <= true) & (true <= found["delta_high"])).sum()), asked + 5
    assert 0.91 <= inside / asked <= 0.985


def test_what_both_arms_share_in_a_process_is_no_difference():
    rows = synthetic.rows(contexts=(16_384, 24_576), batches=(8,), jitter=0.001)
    slow = [apart(row, p, us) for row in rows for p, us in enumerate((0.0, 2.0, -1.0))]
    found = crossover.pairs(frames.table(slow))
    assert (found["delta_high"] - found["delta_low"]).max() < 0.2


def at(row, when):
    return dataclasses.replace(row, provenance={**row.provenance, "time_utc": when})


def test_a_sitting_counts_once_however_many_processes_it_had():
    rows, made = synthetic.rows(contexts=(16_384, 24_576, 32_768), batches=(8,), jitter=0.001), []
    for row in rows:
        slower = 2.0 * (row.point.arm == "cp")
        made.append(at(row, "2026-11-30T10:00:00+00:00"))
        made += [at(apart(row, p, slower), f"2026-11-30T12:{p:02}:00+00:00") for p in (1, 2, 3)]
    frame = frames.table(made)
    assert sorted(set(frame["sitting"])) == [0, 1] and (frame["sitting"] == (frame["process"] > 0)).all()
    found, alone = crossover.pairs(frame), crossover.pairs(frames.table(rows))
    assert found["delta_us"].to_numpy() == pytest.approx(alone["delta_us"].to_numpy() + 1.0, abs=0.05)  # not 2: three rows of one sitting
    assert (found["delta_low"] < alone["delta_us"]).all() and (found["delta_high"] > alone["delta_us"] + 2.0).all()
    together = crossover.pairs(frames.table([at(r, "2026-11-30T10:00:00+00:00") for r in made]))  # four processes: two deviations are 1 µs
    assert together["delta_us"].to_numpy() == pytest.approx(alone["delta_us"].to_numpy() + 2.0, abs=0.05)
    assert (together["delta_high"] - together["delta_low"]).max() < (found["delta_high"] - found["delta_low"]).min()


def test_rows_without_a_time_are_of_one_sitting():
    assert set(frames.table(synthetic.rows(contexts=(16_384,), batches=(8,)))["sitting"]) == {0}


def test_repeats_far_away_count_only_where_none_is_near():
    near, far, once = (20.0, pandas.Series([1.0, 1.2])), (400.0, pandas.Series([10.0, 14.0, 18.0])), (21.0, pandas.Series([1.1]))
    assert crossover.between([near, far, once], 25.0) == (pytest.approx(0.2 / math.sqrt(2)), 1, 0.0, 0)
    assert crossover.between([(40.0, near[1]), far], 25.0) == (pytest.approx(0.2 / math.sqrt(2)), 1, 0.0, 0)  # near ones as they are
    assert crossover.between([far, once], 25.0) == (pytest.approx(4.0 / 16), 2, 0.0, 0)  # 4 of 400 µs are 0.25 of 25
    assert crossover.between([far], 800.0) == (pytest.approx(4.0), 2, 0.0, 0)
    assert crossover.between([once], 25.0) == (0.0, 0, 0.0, 0)


def test_what_all_points_share_is_told_from_what_each_has_alone():
    moved = [(20.0, pandas.Series([0.0, 1.0 + e, 2.0 - e])) for e in (0.1, -0.1, 0.2, -0.2)]
    common, units, alone, freedom = crossover.between(moved, 20.0)
    assert (common, units, freedom) == (pytest.approx(1.0, rel=0.01), 2, 6) and 0.1 < alone < 0.3


def test_arms_that_never_met_are_undecided_and_only_processes_that_timed_both_count():
    tp, cp = synthetic.rows(contexts=(16_384,), batches=(8,), jitter=0.001)
    apart_by_days = frames.table([at(tp, "2026-11-30T10:00:00+00:00"), at(cp, "2026-12-01T10:00:00+00:00")])
    assert list(crossover.pairs(apart_by_days)["verdict"]) == ["UNDECIDED"] and list(crossover.pairs(apart_by_days)["processes"]) == [0]
    plain = crossover.pairs(frames.table([tp, cp])).iloc[0]
    more = crossover.pairs(frames.table([tp, cp, apart(tp, 1, 4.0)])).iloc[0]  # a process that CP has not: its TP is not compared
    assert more["delta_us"] == pytest.approx(plain["delta_us"]) and more["processes"] == 1


def test_one_point_measured_again_does_not_undo_what_many_processes_told():
    rows = synthetic.rows(contexts=(16_384, 24_576, 32_768), batches=(1, 8), jitter=0.001)
    made = [at(apart(r, p, 0.05 * p * (r.point.arm == "cp")), f"2026-11-30T10:{p:02}:00+00:00") for r in rows for p in range(3)]
    later = [at(apart(r, 3, 0.1 * (r.point.arm == "cp")), "2026-12-01T10:00:00+00:00") for r in rows if (r.point.context_tokens, r.point.batch) == (16_384, 1)]
    before, after = (crossover.pairs(frames.table(r)) for r in (made, made + later))
    assert ((after["delta_high"] - after["delta_low"]) < 2 * (before["delta_high"] - before["delta_low"])).all()


def test_the_newest_of_rows_of_one_process_counts():
    first, second = (synthetic.rows(contexts=(16_384,), batches=(8,), seed=s) for s in (1, 2))
    frame = frames.table([*first, *second])
    assert list(frame["median_us"]) == [r.median_us for r in second]


# Break-even: every answer it can give.


def paired(deltas, contexts=(8192, 32_768, 131_072), batch=8, spread=0.001):
    """Pairs whose CP - TP are given, at one batch, with relative noise `spread`."""
    rows = []
    for context, delta in zip(contexts, deltas, strict=True):
        tp, cp = synthetic.rows(contexts=(context,), batches=(batch,))
        for row, us in ((tp, 20.0), (cp, 20.0 + delta)):
            rows.append(
                dataclasses.replace(row, samples_us=[us * (1 + spread * v) for v in (-2, -1, -0.5, 0, 0.5, 1, 2)])
            )
    return crossover.pairs(frames.table(rows))


def test_crosses_where_the_line_does():
    answer = crossover.break_even_measured(paired([3, 1, -3]))[0]
    assert answer.answer == "crosses" and answer.sure and answer.bracket == (32_768, 131_072)
    assert answer.value == pytest.approx(32_768 + (131_072 - 32_768) / 4, rel=0.01)
    assert answer.low < answer.value < answer.high
    assert "between 32k and 128k" in answer.text


def test_none_in_range_below_range_and_undecided():
    assert crossover.break_even_measured(paired([5, 4, 3]))[0].answer == "none in range"
    assert crossover.break_even_measured(paired([-5, -4, -3]))[0].answer == "below range"
    flat = crossover.break_even_measured(paired([0.05, -0.05, 0.02], spread=0.1))[0]
    assert flat.answer == "undecided" and not flat.sure
    one = crossover.break_even_measured(paired([3], contexts=(8192,)))[0]
    assert one.answer == "none in range"


def test_a_crossing_that_the_noise_moves_past_its_neighbours_is_uncertain():
    answer = crossover.break_even_measured(paired([3, 0.1, -3], spread=0.05))[0]
    assert answer.answer == "crosses" and not answer.sure
    assert "uncertain" in answer.text


def test_interpolation_knows_that_short_rows_read_nothing():
    rows = synthetic.rows(
        tp={"launch": 5.0, "us_per_mb": 0.2},
        cp={"launch": 7.0, "us_per_mb": 0.2},
        contexts=(1024, 32_768),
        batches=(1, 4, 64),
        jitter=0,
    )
    answers = crossover.break_even_measured(crossover.pairs(frames.table(rows)))
    need = 2.0 / (0.2 * 0.5) / (128 * 128 * 2 / 1e6)  # blocks whose saved half pays for 2 us
    assert [a.answer for a in answers] == ["none in range", "crosses", "crosses"]
    assert answers[1].value == pytest.approx(need / 4 * 128, rel=0.03)
    assert answers[2].value == 16 * 128  # CP wins as soon as anything is read


def test_the_model_answers_extrapolated_none_and_below():
    def answer(cp_launch, contexts=(8192, 32_768), slope=0.2):
        rows = synthetic.rows(
            tp={"launch": 5.0, "us_per_mb": 0.2},
            cp={"launch": cp_launch, "us_per_mb": slope},
            contexts=contexts,
            batches=(1, 2, 4),
            noise=0.002,
        )
        tp, cp = fit.two_term_fits(frames.table(rows))
        return crossover.break_even_model(tp, cp, [1])[0]

    beyond = answer(25.0)
    assert beyond.answer == "extrapolated" and beyond.value > 131_072 and "extrapolated to" in beyond.text
    assert answer(25.0, slope=0.45).answer == "none in range"
    assert answer(1.0).answer == "below range"
    assert answer(5.5).answer == "crosses"


def test_break_even_by_batch_too():
    tp, cp = fit.two_term_fits(
        frames.table(
            synthetic.rows(
                tp={"launch": 5.0, "us_per_mb": 0.2},
                cp={"launch": 15.0, "us_per_mb": 0.2},
                noise=0.002,
                contexts=(8192, 32_768, 131_072),
            )
        )
    )
    found = crossover.break_even_model(tp, cp, [32_768], axis="batch")[0]
    assert found.value == pytest.approx(10 / 0.1 / (256 * 32_768 / 1e6), rel=0.05)
    with pytest.raises(ValueError, match="axis='rows'"):
        crossover.break_even_model(tp, cp, [1], axis="rows")
    other = dataclasses.replace(cp, label={**cp.label, "node": "another"})
    with pytest.raises(ValueError, match="node of the models differs"):
        crossover.break_even_model(tp, other, [1])


def test_published_break_even():
    """None at 8k up to batch 32; between 8 and 16 at 32k, uncertain at 5% noise; between 2 and 8 at 128k."""
    uniform = crossover.headline(crossover.comparisons(frames.published(), noise=0.05))
    found = {a.at: a for a in crossover.break_even_measured(uniform.pairs, axis="batch")}
    assert found[8192].answer == "none in range"
    assert found[32_768].bracket == (8, 16) and found[32_768].answer == "crosses" and not found[32_768].sure
    assert found[131_072].bracket == (2, 8) and found[131_072].sure
    calm = crossover.headline(crossover.comparisons(frames.published(), noise=0.002))
    assert {a.at: a for a in crossover.break_even_measured(calm.pairs, axis="batch")}[32_768].sure


def test_find_run_prefers_local_then_recorded(tmp_path):
    from m3cp import records

    with pytest.raises(FileNotFoundError, match="m3cp sweep"):
        frames.find_run("", tmp_path)
    row = synthetic.rows(contexts=(8192,), batches=(1,))[0]
    records.append(tmp_path / "data" / "measured" / "h200x2", row)
    assert frames.find_run("", tmp_path).name == "h200x2"
    assert frames.load_run("", tmp_path).source == "recorded"
    records.append(tmp_path / "data" / "runs" / "first", row)
    assert frames.find_run("", tmp_path).name == "first"
    here = frames.load_run("", tmp_path)
    assert here.source == "measured here" and frames.load_compare("", here, tmp_path).name == "h200x2"
    assert frames.load_compare("none", here, tmp_path) is None
    assert frames.load_compare("", frames.load_run("h200x2", tmp_path), tmp_path) is None
    with pytest.raises(FileNotFoundError, match="nowhere.*h200x2, first"):
        frames.find_run("nowhere", tmp_path)


# A planted truth: 200 synthetic nodes.

KEYS = {"bytes": "us_per_mb"}  # terms whose planted value has another name
NODES = {  # form, truth of TP and of CP, what the rows name
    "unknown kernels": ("staged", synthetic.TP, synthetic.CP, {}),
    "staged": ("staged", synthetic.STAGED_TP, synthetic.STAGED_CP, {"provenance": synthetic.PROVENANCE}),
    "one launch": ("one_launch", synthetic.FUSED_TP, synthetic.FUSED_CP, {"provenance": synthetic.PROVENANCE}),
}


@pytest.fixture(scope="module", params=NODES)
def planted(request):
    """Coverage of each parameter and of break-even, and the width of its band, over 200 noisy copies of one node."""
    form, *truths, changes = NODES[request.param]
    batches, seeds = (1, 2, 4, 8, 16, 32, 64), 200
    contexts = (4096, 8192, 12_288, 16_384, 24_576, 32_768, 49_152, 65_536, 131_072, 524_288)
    asked = {"staged": (8, 32), "one launch": (2, 4)}.get(request.param, (1, 2))  # where that node breaks even
    frame = frames.table(synthetic.rows(*truths, contexts=contexts, batches=batches, jitter=0, form=form, **changes))
    clean = [frame[frame["arm"] == arm] for arm in ("tp", "cp")]
    inside, widths, true = {}, {b: [] for b in asked}, {}
    grid = np.array(crossover.context_grid(2304, 2**20, 256), dtype=float)
    templates = [rows["point"].iloc[0] for rows in clean]
    for batch in asked:
        tp, cp = (
            np.array([synthetic.truth_us(dataclasses.replace(t, context_tokens=int(c), batch=batch), truth) for c in grid])
            for t, truth in zip(templates, truths, strict=True)
        )
        true[batch] = float(crossover.crossings(grid, cp - tp)[0])
    for seed in range(seeds):
        rng, models = RNG(seed), []
        for rows, truth in zip(clean, truths, strict=True):
            us = rows["median_us"].to_numpy() * (1 + 0.01 * rng.standard_normal(len(rows)))
            models.append(fit.fit_model(rows.assign(median_us=us, samples_us=[[v] for v in us]), fit.ALL_TERMS))
            for name in models[-1].terms:
                if KEYS.get(name, name) in truth:
                    low, high = models[-1].fit.interval(name)
                    arms = 1 if name == "payload" else 2
                    inside[name] = inside.get(name, 0) + (low <= truth[KEYS.get(name, name)] <= high) / arms
        for answer in crossover.break_even_model(*models, asked, draws=200, seed=seed):
            inside[answer.at] = inside.get(answer.at, 0) + (answer.low <= true[answer.at] <= answer.high)
            widths[answer.at].append((answer.high - answer.low) / answer.value)
    expected = {n for n in fit.ALL_TERMS if any(KEYS.get(n, n) in truth for truth in truths)} | set(asked)
    assert set(inside) == expected
    return {name: count / seeds for name, count in inside.items()}, {b: float(np.median(w)) for b, w in widths.items()}


def test_95_percent_intervals_cover_between_91_and_98(planted):
    coverage, _ = planted
    assert {name: v for name, v in coverage.items() if not 0.91 <= v <= 0.98} == {}


def test_the_band_of_break_even_is_narrow(planted):
    _, widths = planted
    assert {batch: w for batch, w in widths.items() if w > 0.25} == {}


def test_rows_behind_an_evicting_read_stay_out_of_slopes():
    rows = synthetic.rows(contexts=(4096, 8192, 32_768), jitter=0)
    late = [
        dataclasses.replace(r, evict_us=30.0, samples_us=[s + 2 for s in r.samples_us]) if r.point.context_tokens == 4096 else r
        for r in rows
    ]
    without = [r for r in rows if r.point.context_tokens != 4096]
    a, b = (fit.two_term_fits(frames.table(r))[0] for r in (late, without))
    assert np.array_equal(a.fit.values, b.fit.values) and (a.evicted, b.evicted) == (4, 0)
    assert crossover.pairs(frames.table(late)).set_index(["context_tokens", "batch"])["evicted"].sum() == 4
    with pytest.raises(ValueError, match="8 were timed behind an evicting read"):
        fit.fit_model(frames.table([dataclasses.replace(r, evict_us=30.0) for r in without if r.point.arm == "tp"]))


def late_short_rows(contexts=(1024, 8192, 32_768), batches=(8, 32)):
    """Rows whose shortest context was timed behind an evicting read; CP wins at all others."""
    rows = synthetic.rows(cp={**synthetic.CP, "launch": 4.1}, contexts=contexts, batches=batches, jitter=0.001, form="one_launch")
    return [dataclasses.replace(r, evict_us=30.0) if r.point.context_tokens == contexts[0] else r for r in rows]


def test_break_even_is_not_interpolated_from_rows_behind_an_evicting_read():
    rows = late_short_rows()
    paired = crossover.pairs(frames.table(rows))
    assert set(paired[paired["delta_us"] > 0]["context_tokens"]) == {1024}  # with them, break-even would be 2k
    assert [a.answer for a in crossover.break_even_measured(paired)] == ["below range"] * 2
    assert [a.at for a in crossover.break_even_measured(paired, axis="batch")] == [8192, 32_768]
    line = break_even_lines.measured_lines(frames.table(rows))[0]
    assert {line.cell(a) for a in line.answers} == {"below range (from 8k)"} and min(line.pairs["context_tokens"]) == 8192
    found = crossover.comparisons(frames.table(rows), draws=20)[0]
    assert {a.answer for a in found.measured} == {"below range"} and review.pays_from(found)[0] == "always"


def test_rows_behind_an_evicting_read_alone_answer_nothing():
    late = [dataclasses.replace(r, evict_us=30.0) for r in late_short_rows(contexts=(4096, 8192, 32_768))]
    paired = crossover.pairs(frames.table(late))
    assert crossover.break_even_measured(paired) == [] and break_even_lines.measured_lines(frames.table(late)) == []
    assert review.pays_from(crossover.comparisons(frames.table(late), draws=20)[0])[0] == "undecided"
    quoted = review.reference(crossover.comparisons(frames.table(late_short_rows(contexts=(8192, 16_384, 32_768))), draws=20)[0])
    assert set(quoted["context_tokens"]) == {16_384, 32_768}


# Held out, aims, what moves the line, and what is only assumed.


@pytest.fixture(scope="module")
def fine():
    """A synthetic node measured finely enough for the whole model, half a percent of noise."""
    frame = frames.table(
        synthetic.rows(contexts=(4096, 8192, 16_384, 32_768, 65_536, 131_072), batches=(1, 2, 8, 32), noise=0.005)
    )
    return crossover.comparisons(frame, fit.ALL_TERMS, draws=100)[0]


def test_published_table_within_a_tenth_in_sample_and_by_batch():
    table = heldout.error_table(frames.published())
    gated = table[table["held_out"].isin(["nothing", "batch"])]
    assert len(gated) == 4 and (gated["model_median"] <= 0.10).all()
    assert set(table["held_out"]) == {"nothing", "batch", "context_tokens", "mix"}  # the others are reported, not gated
    assert (table["line_worst"] > table["model_worst"]).sum() >= 5
    text = heldout.markdown(frames.published())
    assert text.count("\n") == 3 and "| sglang_cp/collective/gathered P=4 fp8_e4m3fn warm | 17 | " in text
    assert [len(line.split("|")) for line in text.splitlines()] == [8] * 4 and text.count("%") == 32


def test_the_readme_shows_the_errors_of_the_recorded_rows():
    """The README's table is what `m3cp fit h200x2 --errors` prints, up to what rounding may do elsewhere."""
    readme = (frames.ROOT / "README.md").read_text().splitlines()
    head, _, *lines = heldout.markdown(frames.load_run("h200x2").frame).splitlines()
    for line in (head, *lines):
        name, rows = line.split(" | ")[:2]
        shown = [known for known in readme if known.startswith(f"{name} | {rows} | ")]
        assert len(shown) == 1, f"paste what `m3cp fit h200x2 --errors` prints: {line}"
        for ours, theirs in zip(*(re.findall(r"[0-9.]+(?=%)", text) for text in (line, shown[0])), strict=True):
            assert float(ours) == pytest.approx(float(theirs), abs=1.01 if "." not in ours else 0.21), line


def test_the_model_beats_a_straight_line_where_it_was_not_fitted(fine):
    tp, cp = crossover.arm_frames(fine)
    for rows in (tp, cp):
        for by in ("batch", "context_tokens"):
            found = heldout.held_out(rows, by)
            assert len(found) == 24
            assert found["model_error"].abs().median() < 0.02 < found["line_error"].abs().median()
        assert heldout.held_out(rows, "mix").empty
    with pytest.raises(ValueError, match="by='rows'"):
        heldout.held_out(tp, "rows")


def test_twelve_rows_with_a_batch_left_out_know_that_an_exchange_grows_by_doublings():
    """Eight rows allow four parameters: what grows with the payload comes before what grows with the rows."""
    made = []
    for row in synthetic.rows(cp={"launch": 18.0, "us_per_mb": 0.23}, contexts=(8192, 32_768, 65_536, 131_072), batches=(1, 8, 32), noise=0.003):
        sent_kib = row.point.batch * (4 * 16 * 8 + 2 * 256) / 1024  # as in synthetic.truth_us
        extra = 1.2 * math.log2(1 + sent_kib)
        made.append(dataclasses.replace(row, samples_us=[s + extra for s in row.samples_us]))
    frame = frames.table(made)
    found = heldout.held_out(frame[frame["arm"] == "cp"], "batch")
    assert len(found) == 12 and found["model_error"].abs().max() < 0.03


@pytest.mark.parametrize(
    ("name", "arm", "context", "batch", "amount"),
    [
        ("steps", "tp", 32_768, 8, 0),
        ("steps", "tp", 49_152, 8, 1),  # 384 blocks: a chunk and a half take two steps
        ("steps", "tp", 65_536, 8, 1),
        ("steps", "cp", 65_536, 8, 0),
        ("steps", "cp", 98_304, 8, 1),
        ("refill", "tp", 65_664, 2, 0),  # 1,024 blocks are read, 528 programs hold 1,056
        ("refill", "tp", 84_608, 2, 0.5),  # 1,320: every second program takes a third
        ("refill", "tp", 131_072, 8, 1),
        ("refill", "vllm_cp", 49_152, 8, 0),  # 1,536 blocks by 384 programs of four, of which 132 units hold 396
        ("refill", "vllm_cp", 65_536, 8, 1),
        ("depth", "vllm_tp", 32_768, 8, 0),  # 256 blocks in 256 pieces
        ("depth", "vllm_tp", 98_304, 8, math.log2(3)),
        ("depth", "vllm_tp", 131_072, 32, 3),  # 4,096 programs: 128 pieces of 8 blocks
        ("depth", "vllm_tp", 131_072, 5000, 10),  # one piece
        ("unfilled", "vllm_cp", 32_768, 1, 1 - 128 / 528),  # four blocks a program, 132 units
        ("unfilled", "vllm_cp", 131_072, 8, 0),
    ],
)
def test_amounts_by_hand(name, arm, context, batch, amount):
    ways = {"exchange": "collective", "queries": "gathered"} if arm.endswith("cp") else {}
    point = Point(context, batch, world=2, max_context=131_072, arm=arm, form=None if arm.startswith("vllm") else "staged", **ways)
    grid = terms.VLLM_TP_GRID if arm == "vllm_tp" else 0
    how = terms.Kernels(terms.choice(arm, point.form, 132), units=132, grid=grid)
    assert terms.TERMS[name].applies(arm, how)
    assert terms.TERMS[name].amount(fit.load(point), how) == pytest.approx(amount, abs=1e-12)


def test_vllms_launch_geometry_is_learnt_from_twelve_rows():
    """A context left out leaves nine rows, which allow five parameters: CP has as many."""
    made, truths = [], ({"depth": 0.9}, {"unfilled": 2.0, "refill": 2.4, "payload": 0.7})
    for seed, context in enumerate((8192, 32_768, 65_536, 131_072)):
        for batch in (1, 8, 32):
            visible, base = context // 128, Point(context, batch, world=2, max_context=131_072, arm="vllm_tp", form=None)
            read = batch * visible // 2
            tp = 7 + 0.0072 * batch * (visible - 1) + 0.9 * max(0.0, math.log2(visible / (128 if batch == 32 else 256)))
            cp = 16 + 0.0072 * read + 2.0 * max(0.0, 1 - read / 528) + 2.4 * (read > 1584)
            cp += 0.7 * math.log2(1 + batch * (4 * 16 * 8 + 2 * 256) / 1024)
            other = dataclasses.replace(base, arm="vllm_cp", exchange="symmetric", queries="gathered")
            made += [synthetic.row(p, us, RNG(seed), jitter=0.001, path=p.arm, provenance=synthetic.PROVENANCE) for p, us in ((base, tp), (other, cp))]
    comparison = crossover.comparisons(frames.table(made), fit.ALL_TERMS, draws=50)[0]
    for model, truth in zip(comparison.models, truths, strict=True):
        assert {name: model.fit.value(name) for name in truth} == pytest.approx(truth, rel=0.1)
    for arm in crossover.arm_frames(comparison):
        assert heldout.held_out(arm, "context_tokens")["model_error"].abs().max() < 0.01
    near = heldout.differences(comparison)
    inner = near[~near["beyond"].astype(bool)]
    assert len(inner) and inner["held_out_ok"].all() and near["in_sample_ok"].all()


def test_the_aims_are_met_on_a_node_of_the_models_kind_and_missed_on_another(fine):
    met = heldout.targets(fine)
    assert [t for t in met if not t.met and "an end of the range" not in t.name] == []
    assert {"break-even at batch 1", "CP - TP near break-even, in sample"} <= {t.name.split(":")[0] for t in met}
    bent = []
    for row in synthetic.rows(contexts=(8192, 16_384, 32_768, 65_536, 131_072), batches=(1, 8, 32)):
        jump = 8.0 if row.point.arm == "cp" and row.point.context_tokens == 32_768 else 0.0
        bent.append(dataclasses.replace(row, samples_us=[s + jump for s in row.samples_us]))
    missed = [t.text for t in heldout.targets(crossover.comparisons(frames.table(bent), draws=50)[0]) if t.met is False]
    assert any("CP - TP near break-even, in sample" in t and "MISSED" in t for t in missed)


def lines_of(comparison, at, value, low, high):
    """The aims about break-even where the measured one is said to be `value`, between `low` and `high`."""
    given = crossover.BreakEven("context_tokens", at, "crosses", value, low, high, (0.8 * value, 1.3 * value), True)
    return [t for t in heldout.targets(dataclasses.replace(comparison, measured=(given,))) if t.name.startswith("break-even")]


@pytest.mark.parametrize(
    ("times", "ends", "word"),
    [
        (1.30, (0.9, 1.7), "undecided by the measurement"),  # 23% off, and the measurement allows that
        (1.05, (0.9, 1.7), "undecided by the measurement"),  # within 15%, which such a measurement can't show either
        (1.30, (1.1, 1.9), "MISSED"),  # a wide interval, and the model lies outside of it
        (1.30, (1.28, 1.32), "MISSED"),
        (1.05, (0.98, 1.09), "met"),
        (1.05, (0.0, math.inf), "undecided by the measurement"),
    ],
)
def test_a_break_even_that_was_hardly_measured_decides_nothing(fine, times, ends, word):
    """`times` and `ends`: the measured break-even and its interval over the modelled one."""
    model = next(a for a in fine.model if a.at == 1).value
    (aim,) = lines_of(fine, 1.0, times * model, *(end * model for end in ends))
    assert aim.word == word and aim.undecided == (word == heldout.UNDECIDED) and (aim.met is None) == aim.undecided
    assert word in aim.text


def noisy_at(context, off_us=0.0, noise=0.0):
    """A synthetic node whose CP rows at one context are `off_us` slower and scatter by `noise` (relative)."""
    rows = []
    for row in synthetic.rows(contexts=(4096, 8192, 16_384, 32_768, 65_536, 131_072), batches=(1, 2, 8, 32), noise=0.002):
        if row.point.arm == "cp" and row.point.context_tokens == context:
            us = row.samples_us[0]
            row = dataclasses.replace(row, samples_us=[us * (1 + noise * v) + off_us for v in (-1, -0.6, -0.3, 0, 0.3, 0.6, 1)])
        rows.append(row)
    return crossover.comparisons(frames.table(rows), fit.ALL_TERMS, draws=50)[0]


def test_points_that_were_hardly_measured_count_apart_and_misses_stay_misses():
    calm, noisy, wrong = noisy_at(16_384), noisy_at(16_384, noise=0.3), noisy_at(16_384, off_us=12.0, noise=0.3)
    name = "CP - TP near break-even, in sample"

    def aim(comparison):
        return next(t for t in heldout.targets(comparison) if t.name.startswith(name))

    assert aim(calm).word == "met" and "undecided" not in aim(calm).note
    points = heldout.differences(noisy)
    open_ = points[points["in_sample_undecided"]]
    assert len(open_) and set(open_["context_tokens"]) == {16_384}
    within = int(points["in_sample_ok"].sum())
    assert len(points) - len(open_) <= within and f"{within} of {len(points)} points within; {len(open_)} of all undecided" in aim(noisy).note
    assert aim(noisy).word == "met"
    assert aim(wrong).word == "MISSED"  # as noisy, but the model lies outside of what was measured
    missed = heldout.differences(wrong)
    missed = missed[~missed["in_sample_ok"] & ~missed["in_sample_undecided"]]
    assert 16_384 in set(missed["context_tokens"])
    every = dataclasses.replace(noisy, pairs=noisy.pairs[noisy.pairs["context_tokens"] == 16_384])
    assert aim(every).word == "undecided by the measurement" and aim(every).met is None
    count = len(heldout.differences(every))
    assert count and f"of {count} points within; {count} of all undecided" in aim(every).note
    # Points that are all behind an evicting read: nothing to judge, and no aim about it.
    none = dataclasses.replace(noisy, pairs=noisy.pairs.assign(evicted=True))
    assert [t.name for t in heldout.targets(none) if t.name.startswith("CP - TP near")] == []


def test_what_moves_the_line_in_words(fine):
    said = crossover.movers(fine.tp, fine.cp, 2)
    assert said[0].startswith("one microsecond off the exchange moves break-even at batch 2 from ")
    now = next(a for a in fine.model if a.at == 2).value
    less = crossover.break_even_model(fine.tp, crossover.shifted(fine.cp, "launch", add=-1.0), [2], draws=20)[0].value
    assert (
        f"from {crossover.tokens_about(now)} tokens to {crossover.tokens_about(less)} tokens" in said[0] and less < now
    )
    assert any("P = 4" in s and "assumed" in s for s in said) and not any("fp8" in s or "4 tokens a request" in s for s in said)
    # What was measured of fp8 caches and of more query tokens is told, never guessed from bytes.
    others = [dataclasses.replace(fine, cp=dataclasses.replace(fine.cp, template=fine.cp.template.replace(**c))) for c in ({"dtype": "fp8_e4m3fn"}, {"query_len": 4})]
    told = crossover.movers(fine.tp, fine.cp, 2, found=[fine, *others])
    for what in ("an fp8 cache: ", "verifying 4 tokens a request: "):
        assert [s for s in told if s.startswith(what)] == [what + "; ".join(a.text for a in fine.measured)]
    with pytest.raises(ValueError, match="term='magic'"):
        crossover.shifted(fine.cp, "magic")


def world_rows(worlds, truth, arm, noise=0.003, seed=0, local=()):
    """Rows of one arm at several worlds; `local` adds cp_local rows there."""
    rng, made = RNG(seed), []
    for world in (*worlds, *local):
        for context in (8192, 32_768, 131_072):
            for batch in (1, 8, 32):
                point = Point(context, batch, world=world, max_context=2**20, form="staged")
                if arm == "cp":
                    point = dataclasses.replace(point, arm="cp", exchange="collective", queries="gathered")
                if world in local and world not in worlds:
                    point = dataclasses.replace(point, arm="cp_local", exchange=None, queries=None)
                us = synthetic.truth_us(point, truth) + (
                    truth.get("peer", 0.0) * max(0, world - 2) if point.arm == "cp" else 0.0
                )
                made.append(synthetic.row(point, us, rng, noise, path=point.arm, timed_region=["score", "merge"]))
    return made


def test_more_ranks_are_predicted_and_say_what_is_assumed():
    truth = {**synthetic.CP, "exchange": 3.0, "peer": 0.5}
    frame = frames.table(world_rows((1, 2), truth, "cp", local=(4, 8)))
    model = fit.fit_model(frame, fit.ALL_TERMS, vary=("world", "arm", "exchange", "queries"))
    assert model.arm == "cp" and "peers" in model.fit.unidentified
    low, high = model.fit.interval("exchange")
    assert low <= 3.0 <= high and high - low < 1.5  # cp_local and P = 1 tell the exchange from the rest
    whole = fit.assume(model, {"peers": fit.PEER_US["collective"]})
    for world in (4, 8):
        point = whole.point(131_072, 8, world=world)
        found = whole.predict(point)
        true = synthetic.truth_us(point, truth) + 0.5 * (world - 2)
        assert "peers assumed 1 ± 1 us/peer" in found.assumed
        assert found.low_us <= true <= found.high_us
        assert found.high_us - found.low_us > model.predict(point).high_us - model.predict(point).low_us
    assert whole.predict(whole.point(131_072, 8, world=2)).assumed == ""
    assert any(line["note"].startswith("assumed") for line in whole.describe())
    assert np.std(whole.fit.draws(500)[:, whole.terms.index("peers")]) > 0.3
    with pytest.raises(ValueError, match="only terms that the data do not identify"):
        fit.assume(model, {"bytes": fit.PEER_US["collective"]})


def test_other_worlds_are_learnt_from_every_world_measured():
    truth = {**synthetic.CP, "exchange": 3.0, "peer": 0.5}
    made = world_rows((1, 2), synthetic.TP, "tp", seed=1) + world_rows((2,), truth, "cp", local=(4, 8))
    local = [dataclasses.replace(r.point, world=2) for r in made if r.point.arm == "cp_local" and r.point.world == 4]
    made += [synthetic.row(p, synthetic.truth_us(p, truth), RNG(2), 0.003, path="cp_local", timed_region=["score", "merge"]) for p in local]
    frame = frames.table(made)
    found = crossover.comparisons(frame, fit.ALL_TERMS, draws=50)[0]
    tp, cp = crossover.across_worlds(frame, found)
    assert (tp.worlds, cp.worlds) == ((1, 2), (2, 4, 8)) and "exchange" in found.cp.fit.unidentified
    low, high = cp.fit.interval("exchange")
    assert low <= 3.0 <= high and high - low < 1.5
    for world in (4, 8):
        guess = cp.predict(cp.point(131_072, 8, world=world))
        true = synthetic.truth_us(cp.point(131_072, 8, world=world), truth) + 0.5 * (world - 2)
        assert guess.low_us <= true <= guess.high_us and "peers assumed 1 ± 1 us/peer" in guess.assumed
    said = crossover.movers(found.tp, found.cp, 8, (tp, cp))
    assert any(line.startswith("P = 4 ") and "assumed" in line for line in said)


def test_a_node_with_skewed_rows_learns_what_imbalance_costs():
    made = []
    for mix in ("uniform", "one_long_rest_1k", "log_uniform"):
        for row in synthetic.rows(contexts=(32_768, 65_536, 131_072), batches=(4, 8, 16, 32), mix=mix, noise=0.003):
            read = [
                max(0, last - first) / (2 if row.point.arm == "cp" else 1) for first, last in synthetic.spans(row.point)
            ]
            extra = 2.0 * (max(read) * len(read) - sum(read)) / 1000
            made.append(dataclasses.replace(row, samples_us=[s + extra for s in row.samples_us]))
    frame = frames.table(made)
    model = fit.fit_model(frame[frame["arm"] == "tp"], fit.ALL_TERMS, vary=("mix",))
    low, high = model.fit.interval("imbalance")
    assert model.fit.value("imbalance") == pytest.approx(2.0, rel=0.02) and high - low < 0.5
    assert model.mixes == ("log_uniform", "one_long_rest_1k", "uniform")
    by_mix = heldout.held_out(frame[frame["arm"] == "tp"], "mix")
    assert set(by_mix["mix"]) == set(model.mixes) and by_mix["model_error"].abs().median() < 0.03
    few = frame[(frame["arm"] == "tp") & ((frame["mix"] == "uniform") | (frame["context_tokens"] == 32_768) & (frame["batch"] < 32))]
    assert set(heldout.held_out(few, "mix")["mix"]) == {"log_uniform", "one_long_rest_1k"}  # six rows don't predict uniform ones


def test_sets_of_rows_have_names_of_their_own():
    """Rows of two code versions, bounds or boundaries make two sets; one file never overwrites another's figure."""
    rows = synthetic.rows(contexts=(8192, 32_768), batches=(1,))
    other_code = [dataclasses.replace(r, provenance={"code_hash": "other", "commit": "x"}) for r in rows]
    other_bound = [dataclasses.replace(r, point=dataclasses.replace(r.point, max_context=65_536)) for r in rows]
    in_layer = [dataclasses.replace(r, timed_region=[*r.timed_region, "layer"]) for r in rows]
    frame = frames.table(rows + other_code + other_bound + in_layer)
    for names in (
        [c.name for c in crossover.comparisons(frame, draws=20)],
        [n for n, _, _ in crossover.curve_sets(frame)],
    ):
        assert len(names) == len(set(names)) == 4 and all("/" not in n and " " not in n for n in names)
    alone = crossover.comparisons(frames.table(rows), draws=20)
    assert [c.name for c in alone] == ["cp_staged_collective_gathered_p2_bf16_uniform_q1_cold_graph"]


def test_a_charged_projection_is_part_of_the_comparison():
    rows = synthetic.rows(contexts=(8192, 32_768), batches=(1,))
    rows = [
        dataclasses.replace(r, timed_region=["extra_projection", *r.timed_region]) if r.point.arm == "cp" else r
        for r in rows
    ]
    assert len(crossover.pairs(frames.table(rows))) == 2


def test_adaptive_rows_are_a_variant_of_their_own():
    base = Point(32_768, 8, world=2, form="one_launch")
    cp = dataclasses.replace(base, arm="cp", exchange="symmetric", queries="gathered")
    made = [
        synthetic.row(base, 20.0, RNG(0)),
        synthetic.row(cp, 15.0, RNG(1)),
        synthetic.row(dataclasses.replace(cp, threshold_blocks=300), 15.3, RNG(2), path="adaptive"),
    ]
    names = sorted(c.name for c in crossover.comparisons(frames.table(made), draws=20))
    assert [n.startswith("cp_one_launch_symmetric_gathered_above300_p2") for n in names] == [True, False]
