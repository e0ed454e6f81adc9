"""From a layer to a token: arithmetic by hand, the published figures, and pairs of results that may not be compared."""

import json
import math

import pytest
import synthetic

from m3cp import crossover, fit, frames, plots, results, serving


@pytest.fixture(scope="module")
def models():
    rows = synthetic.rows(contexts=(4096, 8192, 32_768, 65_536, 131_072), batches=(1, 2, 8, 32, 64), noise=0.003)
    found = crossover.comparisons(frames.table(rows), fit.ALL_TERMS, draws=20)[0]
    return found.tp, found.cp


@pytest.fixture(scope="module")
def published():
    found = crossover.headline(crossover.comparisons(frames.published(), fit.ALL_TERMS, noise=0.05, draws=20))
    return found.tp, found.cp


def true_delta(context, batch):
    points = [synthetic.Point(context, batch, world=2, max_context=2**20, form="staged")]
    points.append(points[0].replace(arm="cp", exchange="collective", queries="gathered"))
    return synthetic.truth_us(points[1], synthetic.CP) - synthetic.truth_us(points[0], synthetic.TP)


def test_57_layers_reuse_acceptance_and_eager_steps_by_hand():
    assert serving.Setting().change_ms(-10.0) == pytest.approx(-0.57)
    assert serving.Setting(reuse=4).scoring_layers == 15
    assert serving.Setting(reuse=4).change_ms(-10.0) == pytest.approx(-0.15)
    assert serving.Setting(acceptance=2.78).change_ms(-10.0) == pytest.approx(-0.57 / 2.78)
    assert serving.Setting(eager_share=0.25, eager_extra_us=20.0).change_ms(-10.0) == pytest.approx(
        57 * (-10 + 5) / 1000
    )


@pytest.mark.parametrize("bad", [{"layers": 0}, {"reuse": 0}, {"reuse": 58}, {"acceptance": 0.9}, {"eager_share": 1.1}])
def test_settings_are_checked(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))}="):
        serving.Setting(**bad)


def test_the_decode_batch_solves_its_equation():
    assert serving.decode_batch(16, 1000, 20.0, 20.0) == pytest.approx(8.0)
    assert serving.decode_batch(16, 1000, 20.0, 0.0) == pytest.approx(16.0)

    def tpot(batch):
        return 10.0 + batch

    batch = serving.decode_batch(32, 500, tpot, 30.0)
    seconds = 500 * tpot(batch) / 1000
    assert batch == pytest.approx(32 * seconds / (seconds + 30.0), rel=1e-6)
    for bad in ({"concurrency": 0}, {"output_tokens": 0}, {"tpot_ms": 0.0}, {"other_s": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))}="):
            serving.decode_batch(**{"concurrency": 1, "output_tokens": 1, "tpot_ms": 1.0, "other_s": 1, **bad})


def test_the_distribution_of_batches():
    found = serving.batch_distribution(30, 0.3)
    assert sum(p for _, p in found) == pytest.approx(1, abs=1e-4) and min(b for b, _ in found) >= 1
    assert sum(b * p for b, p in found) == pytest.approx(9, rel=0.01)
    assert serving.batch_distribution(4, 1.0) == [(4, 1.0)]
    for args in ((0, 0.3), (5, 0.0), (5, 1.5)):
        with pytest.raises(ValueError):
            serving.batch_distribution(*args)


def test_the_change_of_tpot_is_the_layers_difference_times_57(models):
    found = serving.tpot_change(*models, 131_072, [(8, 1.0)])
    assert found.ms == pytest.approx(57 * true_delta(131_072, 8) / 1000, rel=0.03)
    assert found.low_ms < found.ms < found.high_ms < 0
    assert found.percent(10.0) == pytest.approx(10 * found.ms)
    mixed = serving.tpot_change(*models, 32_768, [(1, 3.0), (32, 1.0)])
    assert mixed.ms == pytest.approx(57 * (3 * true_delta(32_768, 1) + true_delta(32_768, 32)) / 4 / 1000, rel=0.05)


def test_published_serving_figures_and_what_is_not_explained(published):
    found = serving.against_published(*published)
    tpot = found[found["source"] == "TPOT"].set_index(["context_tokens", "concurrency"])
    assert (tpot.loc[[(4096, 8), (4096, 32)], "predicted_ms"] > 0).all()  # CP loses at 4k ...
    assert (tpot.loc[[(131_072, 8), (131_072, 32)], "predicted_ms"] < 0).all()  # ... and wins at 128k: the sign flips
    assert set(tpot["sign"]) == {"agrees", "break-even"}
    agentx = found[found["source"].str.startswith("AgentX")]
    assert len(agentx) == 5 and (agentx["sign"] == "agrees").all()
    assert (agentx["explained"] < 0.6).all()  # the layer's time alone does not explain them, and the words say so
    assert agentx["verdict"].str.contains("explains [0-9]+% of the measured change").all()
    assert agentx["verdict"].str.contains("not explained by the layer's time").any()
    grown = agentx.drop_duplicates("concurrency").sort_values("concurrency")
    assert grown["predicted_ms"].is_monotonic_decreasing and grown["measured_ms"].is_monotonic_decreasing


def test_levers(models):
    table = serving.levers(*models, 65_536, 8).set_index("lever")
    base = table.loc["as measured: TP2, bf16"]
    assert base["cp_ms"] < base["tp_ms"] and base["better"] == "cp"
    assert base["index_gib"] == pytest.approx(8 * 65_536 * 128 * 2 * 57 / 2**30)
    fp8, wide, pair = table.loc["fp8_e4m3fn cache"], table.loc["TP4"], table.loc["2 x TP4"]
    assert fp8["index_gib"] == base["index_gib"] / 2 and fp8["tp_ms"] < base["tp_ms"] and "assuming" in fp8["note"]
    assert wide["cp_ms"] < base["cp_ms"] and wide["tp_ms"] == pytest.approx(base["tp_ms"]) and "assumed" in wide["note"]
    assert pair["index_gib"] == base["index_gib"] / 2 and pair["tp_ms"] < wide["tp_ms"]
    assert table.loc["selection reused over 4 layers", "tp_ms"] == pytest.approx(base["tp_ms"] * 15 / 57)
    assert (
        table.loc["3 draft tokens", "tp_ms"] < base["tp_ms"]
        and "changes answers" in table.loc["selection reused over 4 layers", "note"]
    )
    assert {"TP8", "5 draft tokens"} <= set(table.index)


# Files of the two benchmark tools, with the fields that they write.


def vllm(path, **changes):
    values = {
        "date": "20261001-120000", "endpoint_type": "openai", "backend": "openai", "model_id": "m", "num_prompts": 100, "request_rate": "inf",
        "max_concurrency": 16, "duration": 100.0, "completed": 100, "failed": 0, "total_input_tokens": 7_400_000, "total_output_tokens": 100_000,
        "request_throughput": 1.0, "output_throughput": 1000.0, "total_token_throughput": 75_000.0, "mean_ttft_ms": 900.0, "mean_tpot_ms": 16.0,
        "median_tpot_ms": 15.8, "mean_itl_ms": 16.1, **changes,
    }  # fmt: skip
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    return path


def aiperf(path, **changes):
    values = {
        "schema_version": "1.5", "aiperf_version": "0.12.0", "was_cancelled": False, "error_summary": [],
        "input_config": {"phases": [{"name": "profiling", "concurrency": 16}]},
        "request_count": {"unit": "requests", "avg": 500.0},
        "inter_token_latency": {"unit": "ms", "avg": 16.2, "p50": 15.0, "count": 500},
        "input_sequence_length": {"unit": "tokens", "avg": 73_900.0, "count": 500},
        "output_sequence_length": {"unit": "tokens", "avg": 800.0, "count": 500},
        "output_token_throughput": {"unit": "tokens/sec", "avg": 950.0}, **changes,
    }  # fmt: skip
    path.write_text(json.dumps(values))
    return path


def test_a_pair_of_vllm_results(tmp_path, models):
    pair = results.compare(
        vllm(tmp_path / "a.json"), vllm(tmp_path / "b.json", mean_tpot_ms=15.2, output_throughput=1050.0)
    )
    assert (
        pair.change_ms == pytest.approx(-0.8)
        and pair.change_percent == pytest.approx(-5)
        and pair.throughput_percent == pytest.approx(5)
    )
    assert "16.00 to 15.20 ms (-5.0%)" in pair.text and "72.3k input tokens" in pair.text
    predicted = serving.predict_for(pair, *models)
    assert predicted.low_ms <= predicted.ms <= predicted.high_ms < 0
    assert "predicted" in serving.beside(pair, predicted)
    solved = serving.predict_for(pair, *models, other_s=0.0)
    assert solved.ms == pytest.approx(57 * true_delta(74_496, 16) / 1000, rel=0.05)  # all 16 decode; the mean context
    assert serving.predict_for(pair, *models, other_s=1000.0).ms > solved.ms


def test_a_pair_of_aiperf_results(tmp_path):
    faster = {"unit": "s", "avg": 0.0147}
    pair = results.compare(aiperf(tmp_path / "a.json"), aiperf(tmp_path / "b.json", inter_token_latency=faster))
    assert pair.change_ms == pytest.approx(-1.5) and pair.base.concurrency == 16 and pair.base.tool == "aiperf"


def test_older_vllm_files_and_speculation(tmp_path):
    old = results.read_result(vllm(tmp_path / "a.json", failed=None, completed=97, max_concurrency=None))
    assert old.failed == 3 and old.concurrency is None
    assert results.read_result(vllm(tmp_path / "b.json", spec_decode_acceptance_length=2.78)).acceptance == 2.78


@pytest.mark.parametrize(
    ("make", "base", "cp", "words"),
    [
        (vllm, {}, {"failed": 2}, "cp: 2 failed requests"),
        (vllm, {"failed": None, "completed": 99, "total_input_tokens": 7_326_000}, {}, "base: 1 failed requests"),
        (vllm, {}, {"total_input_tokens": 7_700_000}, "4.1% apart: at most 3%"),
        (vllm, {}, {"max_concurrency": 32}, "concurrency of base is 16 and of cp 32"),
        (vllm, {"completed": 0, "num_prompts": 0}, {}, "no completed request"),
        (aiperf, {}, {"error_request_count": {"unit": "requests", "avg": 3.0}}, "cp: 3 failed requests"),
        (aiperf, {}, {"error_summary": [{"error_details": {}, "count": 4}]}, "cp: 4 failed requests"),
        (aiperf, {}, {"was_cancelled": True}, "cancelled"),
        (aiperf, {}, {"input_sequence_length": {"unit": "tokens", "avg": 70_000.0}}, "5.3% apart"),
        (aiperf, {}, {"inter_token_latency": {"unit": "fortnights", "avg": 1.0}}, "fortnights"),
        (aiperf, {"input_sequence_length": {"unit": "tokens"}}, {}, "apart"),
    ],
)
def test_pairs_that_are_not_compared(tmp_path, make, base, cp, words):
    a, b = make(tmp_path / "a.json", **base), make(tmp_path / "b.json", **cp)
    with pytest.raises(ValueError, match=words):
        results.compare(a, b)


def test_within_3_percent_is_compared_and_two_tools_are_not(tmp_path):
    a = vllm(tmp_path / "a.json")
    assert results.compare(a, vllm(tmp_path / "b.json", total_input_tokens=7_600_000)).base.requests == 100
    with pytest.raises(ValueError, match="vllm bench serve and cp of aiperf"):
        results.compare(a, aiperf(tmp_path / "c.json"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "one JSON object"),
        ("{}", "neither a result"),
        ("nonsense", "not JSON"),
        ('{"mean_tpot_ms": 1}\n{"mean_tpot_ms": 2}\n', "2 results in one file"),
        ('{"mean_tpot_ms": 1, "total_input_tokens": 5}', "completed"),
    ],
)
def test_other_files_are_refused(tmp_path, text, words):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        results.read_result(path)


def test_the_picture_of_measured_against_predicted(published):
    table = serving.against_published(*published)
    figure = plots.served(table[table["measured_ms"].notna()])
    figure.canvas.draw()
    axis = figure.axes[0]
    assert "predicted" in axis.get_xlabel() + axis.get_ylabel() and "measured" in axis.get_xlabel() + axis.get_ylabel()
    assert len(axis.texts) >= 5
    with pytest.raises(ValueError, match="nothing"):
        plots.served(table[table["measured_ms"] > math.inf])


def test_what_the_serving_commands_print(tmp_path):
    from m3cp import records

    run = tmp_path / "node"
    for row in synthetic.rows(contexts=(8192, 32_768, 131_072), batches=(1, 8, 32), noise=0.004):
        records.append(run, row)
    said = "\n".join(serving.main(str(run), context_tokens=65_536, batch=8, concurrency=30))
    assert "30 offered, 22% decoding: -" in said and "30 offered, 41% decoding: -" in said
    assert (
        "| selection reused over 4 layers |" in said
        and "AgentX, final" in said
        and "changes the time per output token by -" in said
    )
    a, b = vllm(tmp_path / "a.json"), vllm(tmp_path / "b.json", mean_tpot_ms=15.5)
    assert len(serving.main_import(a, b)) == 1
    lines = serving.main_import(a, b, run=str(run), figures=tmp_path / "figures")
    assert "predicted" in lines[0] and [p.suffix for p in sorted((tmp_path / "figures").iterdir())] == [".png", ".svg"]
    alone = tmp_path / "alone"
    for row in records.load(run):
        if row.point.arm == "tp":
            records.append(alone, row)
    with pytest.raises(ValueError, match="no CP rows beside TP rows"):
        serving.main(str(alone))
