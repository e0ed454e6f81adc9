"""What the explorer says for a state: the model's own numbers, measured ones called so, and none where nothing was measured."""

import dataclasses
import functools
import re
import statistics
import time

import numpy as np
import pytest
import synthetic

from m3cp import crossover, dashboard, engines, explore, fit, frames
from m3cp.explore import BATCHES, CONTEXTS, Explorer, Node, State
from m3cp.serving import Setting

START = State("node", way="staged/collective", context_tokens=131_072, batch=8)


@functools.cache
def frame():
    rows = synthetic.rows(noise=0.01) + synthetic.rows(contexts=(131_072,), batches=(8, 32), mix="one_long_rest_1k", noise=0.01)
    return frames.table(rows, source="recorded")


@functools.cache
def found():
    return crossover.comparisons(frame(), fit.ALL_TERMS, draws=100)


@functools.cache
def explorer():
    published = crossover.comparisons(frames.published(), fit.ALL_TERMS, noise=0.05, draws=100)
    nodes = [
        Node("node", "recorded", "2x NVIDIA H200", lambda: (frame(), found())),
        Node("here", "measured here", "this machine", lambda: (None, [])),
        Node("published", "published", "4x MI355X", lambda: (None, published)),
    ]
    return Explorer(nodes)


def view(**changes):
    return explorer().view(dataclasses.replace(START, **changes))


def said(seen):
    """The answer as text, without the engines' switches."""
    return re.sub(r"<[^>]+>", " ", seen.words.split("Each engine")[0])


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("context_tokens", 5000, "context_tokens=5000.*1024"),
        ("batch", 3, "batch=3.*1, 2, 4"),
        ("batch", True, "batch=True"),
        ("mix", "even", "mix='even'.*uniform"),
        ("world", 3, "world=3.*2, 4, 8"),
        ("dtype", "int8", "dtype='int8'.*bf16"),
        ("way", "one_launch", "way='one_launch'.*one_launch/symmetric"),
        ("queries", "", "queries=''.*gathered"),
        ("exchange_us", 21, "exchange_us=21.*-10 to 20"),
        ("exchange_us", "3", "exchange_us='3'.*number"),
        ("bandwidth", 0, "bandwidth=0.*0.5 to 2"),
        ("node", 3, "node=3.*text"),
    ],
)
def test_a_state_names_what_is_wrong(name, value, words):
    with pytest.raises(ValueError, match=words):
        State(**{name: value})


def test_a_state_goes_through_yaml_and_refuses_typos():
    import yaml

    state = dataclasses.replace(START, exchange_us=2.5, bandwidth=1.2)
    assert State.of(yaml.safe_load(state.to_yaml())["state"]) == state
    with pytest.raises(ValueError, match="contexts.*context_tokens"):
        State.of({"contexts": 8192})


@pytest.mark.parametrize("way", ["one_launch/symmetric", "staged/collective", "vllm/collective"])
def test_a_state_is_a_grid_that_the_sweep_expands(way):
    from m3cp import grid as planning

    queries = "gathered" if way.startswith("vllm") else "replicated"  # all that an engine has
    state = dataclasses.replace(START, way=way, batch=4, mix="log_uniform", world=4, queries=queries)
    points = planning.expand(explore.sweep_axes(state), device="cpu")
    assert {(p.context_tokens, p.batch, p.mix, p.dtype) for p in points} == {(131_072, 4, "log_uniform", "bf16")}
    (cp,) = [p for p in points if p.arm.endswith("cp")]
    kernels, _, exchange = way.partition("/")
    assert cp.world == 4 and cp.exchange == exchange and cp.queries == queries
    assert cp.form == kernels if cp.arm == "cp" else cp.arm == f"{kernels}_cp"
    assert {p.arm for p in points} == {cp.arm, cp.arm.replace("_cp", "_tp") if "_" in cp.arm else "tp", "page_read"}


def test_the_curves_are_the_models_and_the_line_is_theirs():
    seen, main = view(), crossover.headline(found())
    for arm, model in ((seen.tp, main.tp), (seen.cp, main.cp)):
        for i, context in enumerate(CONTEXTS):
            if context <= 2048:
                assert np.isnan(arm.us[i])  # no key is read, and the model is not about that
            else:
                assert arm.us[i] == pytest.approx(model.us(model.point(context, 8)), rel=1e-9)
                assert arm.low[i] <= arm.us[i] <= arm.high[i]
        assert sum(arm.parts.values()) == pytest.approx(arm.us[CONTEXTS.index(131_072)], rel=1e-9)
    for at, answer in zip(BATCHES, crossover.break_even_model(main.tp, main.cp, BATCHES), strict=True):
        line = seen.plane.line[BATCHES.index(at)]
        if answer.value is not None and 4096 < answer.value < 2**19:
            assert line == pytest.approx(answer.value, rel=0.02), at
    assert np.isfinite(seen.plane.line).sum() >= 3
    assert seen.plane.ratio[BATCHES.index(8), CONTEXTS.index(131_072)] == pytest.approx(np.log2(sum(seen.tp.parts.values()) / sum(seen.cp.parts.values())))


def test_a_what_if_is_the_model_with_that_term_changed():
    main, where = crossover.headline(found()), [(131_072, 8)]
    seen = view(exchange_us=3.0, bandwidth=1.25)
    tp, cp = (crossover.shifted(m, "bytes", times=1 / 1.25) for m in (main.tp, main.cp))
    best, drawn = crossover.difference(tp, crossover.shifted(cp, "launch", add=3.0), where, explore.DRAWS)
    assert sum(seen.cp.parts.values()) - sum(seen.tp.parts.values()) == pytest.approx(float(best[0]))
    assert np.std(seen.cp.drawn - seen.tp.drawn) == pytest.approx(np.std(drawn), rel=0.25)  # bytes' uncertainty scales too
    _, drawn = crossover.difference(main.tp, crossover.shifted(main.cp, "launch", add=3.0), where, explore.DRAWS)
    only = view(exchange_us=3.0)
    np.testing.assert_allclose(only.cp.drawn - only.tp.drawn, drawn[:, 0])
    assert seen.state.what_if == "CP +3 µs, bandwidth × 1.25" and "a layer, what-if" in said(seen)
    assert "Measured without the what-if" in said(seen) and "layer, measured" not in said(seen)
    launch = crossover.headline(found()).cp.fit.value("launch")
    assert launch < 10 and "launch" not in view(exchange_us=-10.0).cp.parts  # a cost does not fall below 0
    moved = explorer().nodes["node"].scene(START).surfaces[1].us[0, -1] - view(exchange_us=-10.0, batch=1).cp.us[-1]
    assert moved == pytest.approx(launch)


def test_a_measured_point_is_answered_by_its_rows():
    seen, pairs = view(), crossover.headline(found()).pairs
    pair = pairs[(pairs["context_tokens"] == 131_072) & (pairs["batch"] == 8)].iloc[0]
    text = said(seen)
    assert f"TP / CP = {pair['ratio']:.2f} (95% {pair['ratio_low']:.2f} to {pair['ratio_high']:.2f})" in text
    assert f"TP {pair['tp_us']:.4g} µs, CP {pair['cp_us']:.4g} µs a layer, measured" in text
    assert f"{Setting().change_ms(pair['delta_us']):+.3f} ms" in text and "57 sparse layers" in text
    assert "Turn CP on" in text and seen.tp.points[:, 0].tolist() == [1024, 8192, 32_768, 131_072, 524_288]
    limits = [seen.tp.limit[CONTEXTS.index(int(context))] for context in seen.tp.reads[1:, 0]]  # the first reads no key
    assert seen.tp.reads[1:, 1] == pytest.approx([3.0 + us for us in limits], rel=0.01)
    between = view(context_tokens=65_536)
    assert "a layer, modelled" in said(between) and "measured" not in said(between)
    assert "Leave CP off: TP is faster" in said(view(context_tokens=8192, batch=1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "fp8_e4m3fn"}, "a cache of fp8_e4m3fn was not measured on 2x NVIDIA H200 \\(measured: bf16\\)"),
        ({"way": "one_launch/symmetric"}, "one launch, symmetric memory was not measured.*staged, collective"),
        ({"queries": "replicated"}, "replicated queries.* was not measured"),
        ({"mix": "agentic"}, "agentic batches were not measured"),
        ({"node": "here"}, "no measured CP yet.*make sweep"),
        ({"node": "published", "way": "sglang/collective", "dtype": "fp8_e4m3fn", "world": 8}, "P = 4 only; P = 8 was not measured"),
        ({"node": "published", "way": "sglang/collective", "dtype": "bf16", "world": 4}, "bf16 was not measured on 4x MI355X"),
    ],
)
def test_what_was_not_measured_gets_words_and_no_number(changes, words):
    seen = view(**changes)
    assert re.search(words, seen.why) and "Not measured here" in said(seen) and "No figure is given" in said(seen)
    assert not re.search(r"\d µs|\d ms|\d×|TP / CP", said(seen))
    for arm in (seen.tp, seen.cp):
        assert np.isnan(arm.us).all() and np.isnan(arm.limit).all() and not arm.parts and not len(arm.points)
    assert np.isnan(seen.plane.ratio).all() and np.isnan(seen.plane.line).all() and not seen.plane.cells


def test_choosers_say_what_a_node_has_not_measured():
    labels = {name: dict((v, k) for k, v in options) for name, options in explorer().options(START).items()}
    assert labels["dtype"] == {"bf16": "bf16", **{d: f"{d} – not measured here" for d in ("fp16", "fp8_e4m3fn", "fp8_e4m3fnuz")}}
    assert labels["world"] == {2: "2", 4: "4 – assumed", 8: "8 – assumed"}
    assert labels["mix"]["one_long_rest_1k"] == "one long rest 1k" and "not measured" in labels["mix"]["agentic"]
    assert "not measured" in labels["way"]["one_launch/symmetric"] and "not measured" not in labels["way"]["staged/collective"]
    assert labels["node"]["here"] == "this machine: nothing measured yet" and labels["node"]["published"].startswith("published")
    theirs = explorer().nodes["published"].nearest(START)
    worlds = dict((v, k) for k, v in explorer().options(theirs)["world"])
    assert worlds == {2: "2 – not measured here", 4: "4", 8: "8 – not measured here"}


def test_more_ranks_are_assumed_and_less_sure():
    here, wide = view(), view(world=8)
    assert wide.basis == "P = 8 assumed" and "Assumed, not measured: P = 8" in said(wide) and "a layer, assumed" in said(wide)
    spread = [np.ptp(np.percentile(v.cp.drawn, [2.5, 97.5])) for v in (here, wide)]
    assert spread[1] > 2 * spread[0]
    assert not wide.plane.cells and not len(wide.cp.points)


def test_another_mix_says_what_it_was_fitted_to():
    seen = view(mix="one_long_rest_1k")
    assert seen.basis == "modelled, from uniform batches" and "mix=one_long_rest_1k not among uniform" in said(seen)
    assert len(seen.cp.points) == 1 and "a layer, measured" in said(seen)


def test_short_contexts_have_no_model():
    seen = view(context_tokens=1024)
    assert "no key is read" in said(seen) and "layer, measured" in said(seen) and "modelled" not in said(seen)
    assert not seen.tp.parts and not len(seen.tp.drawn)
    assert "No figure" in said(view(context_tokens=2048)) and " µs" not in said(view(context_tokens=2048))


def test_published_figures_are_called_so():
    state = explorer().nodes["published"].nearest(START)
    assert (state.world, state.dtype, state.way) == (4, "fp8_e4m3fn", "sglang/collective")
    seen = explorer().view(dataclasses.replace(state, context_tokens=131_072))
    assert seen.published and "a layer, published" in said(seen) and "5% noise is assumed" in said(seen) and "measured" not in said(seen)
    assert np.isnan(seen.tp.limit).all()  # no page read was published


def test_extrapolation_is_named():
    assert "batch=256 outside 1 to 64" in said(view(batch=256)) and "context_tokens=1048576 outside" in said(view(context_tokens=1 << 20))
    assert "extrapolated" not in said(view())


def test_every_engines_switch_and_proof_is_there():
    import html

    seen = view()
    text = html.unescape(seen.words)
    for switch in engines.SWITCHES:
        assert switch.on in text and switch.proof in text and switch.engine in text
    assert text.count("not for this point: AMD only") == 4  # NVIDIA
    theirs = explorer().view(explorer().nodes["published"].nearest(START))
    assert "not for this point: no fp8_e4m3fn index cache" in theirs.words and "AMD only" not in theirs.words
    assert engines.vendor_of("2x NVIDIA H200") == "nvidia" and engines.vendor_of("4x MI355X") == "amd" and engines.vendor_of("EPYC, 2 cores") == ""
    assert engines.SWITCHES[3].refuses("amd", 2, "bf16") == "P = 4 only" and engines.SWITCHES[0].refuses("nvidia", 8, "fp16") == ""


def test_opening_at_a_node_that_is_not_here():
    with pytest.raises(ValueError, match="node='h100'.*node, here, published"):
        explorer().start(State("h100"))
    assert explorer().start() == dataclasses.replace(State("node"), way="staged/collective")


def test_one_gpu_alone_opens_at_the_node_that_has_an_answer():
    rows = frames.table([r for r in synthetic.rows() if r.point.arm == "tp"], source="measured here")
    alone = Node("alone", "measured here", "one GPU", lambda: (rows, []))
    both = Explorer([alone, explorer().nodes["node"]])
    assert both.start().node == "node" and both.start(State("alone")).node == "alone"
    assert Explorer([alone]).start().node == "alone"


def test_it_opens_inside_what_was_measured():
    """A CPU's rows end at few tokens and two requests: the first picture is of them, not of a hundredfold extrapolation."""
    rows = frames.table(synthetic.rows(contexts=(3072, 4096, 6144), batches=(1, 2), noise=0.01), source="recorded")
    small = Explorer([Node("small", "measured here", "a laptop", lambda: (rows, crossover.comparisons(rows, fit.ALL_TERMS, draws=50)))])
    assert (small.start().context_tokens, small.start().batch) == (6144, 2)
    given = State("small", way="staged/collective")
    assert small.start(given) == given  # what was asked for stays


def test_big_times_are_readable():
    assert [dashboard._short(v) for v in (5, 9999, 20_000, 500_000, 2e7)] == ["5", "9999", "20k", "500k", "20M"]
    assert [dashboard._number(v) for v in (16.034, 9999.4, 340_812.3)] == ["16.03", "9999", "340,812"]


def test_known_nodes_are_this_machine_the_recorded_and_the_published(tmp_path):
    from m3cp import records

    published = crossover.comparisons(frames.published(), noise=0.05, draws=20)
    names = lambda nodes: [(n.name, n.kind) for n in nodes]  # noqa: E731
    assert names(explore.known_nodes({}, published, tmp_path)) == [("here", "measured here"), ("published", "published")]
    for row in synthetic.rows(contexts=(8192, 32_768), batches=(1,)):
        records.append(tmp_path / "data" / "measured" / "two-h200", row)
        records.append(tmp_path / "data" / "runs" / "mine", row)
    nodes = explore.known_nodes({}, published, tmp_path)
    assert names(nodes) == [("mine", "measured here"), ("two-h200", "recorded"), ("published", "published")]
    assert nodes[1].machine == "synthetic 2x H200" and nodes[1].values("way") == ["staged/collective"]


def test_a_move_takes_python_less_than_20_ms():
    """Model and set_data, CPU time of this process, so that what else the machine does is not measured."""
    board, seen = dashboard.Dashboard(), explorer()
    seen.nodes["node"].prepare(START)
    moves = [dataclasses.replace(START, batch=b, context_tokens=c) for b in BATCHES[::2] for c in CONTEXTS[4::9]]
    moves += [dataclasses.replace(START, exchange_us=e / 2, bandwidth=f) for e in range(1, 7) for f in (0.8, 1.4)]
    costs = []
    for state in moves:
        start = time.process_time()
        board.show(seen.view(state))
        costs.append(1e3 * (time.process_time() - start))
    assert statistics.median(costs) < 20 and sorted(costs)[int(0.9 * len(costs))] < 40, costs


def test_too_few_sizes_show_what_was_measured_and_no_model():
    rows = synthetic.rows(contexts=(8192,), batches=(8,))
    few = frames.table(rows, source="measured here")
    node = Node("few", "measured here", "EPYC, 2 cores", lambda: (few, crossover.comparisons(few, fit.ALL_TERMS, draws=50)))
    seen = Explorer([node]).view(dataclasses.replace(START, node="few", context_tokens=8192))
    assert "too few sizes" in seen.why and "a layer, measured" in said(seen) and "modelled" not in said(seen)
    assert len(seen.tp.points) == 1 and np.isnan(seen.tp.us).all() and seen.plane.cells == ((8192, 8, seen.plane.cells[0][2]),)
    elsewhere = Explorer([node]).view(dataclasses.replace(START, node="few"))
    assert "No figure: too few sizes" in said(elsewhere) and " µs" not in said(elsewhere)
    board = dashboard.Dashboard()
    board.show(seen)
    assert "No model: too few sizes" in " ".join(board.absent.get_text().split()) and "No breakdown" in board.parts_title.get_text()
