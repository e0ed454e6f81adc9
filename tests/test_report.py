"""The design review: its sentences follow from the rows, its page is whole, and its figures are the stored ones."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys

import nbformat
import numpy as np
import pytest
import stored_figures
import synthetic
from typer.testing import CliRunner

from m3cp import cli, frames, notebook, records, report, review, terms, workload

NOTEBOOK = notebook.FOLDER / "30_design_review.ipynb"
DEAR = {**synthetic.CP, "launch": 5000.0}  # a fixed cost that nothing measured buys back
CHUNKS = terms.Kernels()
CHEAP = {**synthetic.CP, "launch": 1.0}


def a_run(folder, rows):
    for row in rows:
        records.append(folder, dataclasses.replace(row, provenance={**row.provenance, **stored_figures.GPUS}))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return a_run(tmp_path_factory.mktemp("runs") / "synthetic-node", stored_figures.rows())


@pytest.fixture(scope="module")
def traffic(tmp_path_factory):
    steps = [
        workload.Step((length,) * size, length // 2)
        for length in (5000, 9000, 20_000, 60_000, 100_000)
        for size in range(1, 13)
    ]
    return workload.write(tmp_path_factory.mktemp("traffic") / "mine.jsonl", steps)


@pytest.fixture(scope="module")
def found():
    return stored_figures.reviewed()


@pytest.fixture(scope="module")
def with_traffic(run, traffic):
    return review.gather(str(run), str(traffic))


@pytest.mark.parametrize("name", [n for n in stored_figures.FIGURES if n.startswith("review")])
def test_figures_are_the_stored_ones(name):
    stored = json.loads((stored_figures.STORED / f"{name}.json").read_text())
    assert stored_figures.same(stored_figures.facts(stored_figures.FIGURES[name]()), stored) == []


def test_the_stored_gains_are_what_the_rows_say():
    """The stored file is no oracle by itself: its marks are the differences of the planted rows."""
    stored = json.loads((stored_figures.STORED / "review_gains.json").read_text())
    panel = next(a for a in stored["axes"] if a["title"] == "batch 8")
    (marks,) = [line for line in panel["lines"] if line["marker"] == "s"]
    for context, gain in zip(marks["x"], marks["y"], strict=True):
        us = {
            r.point.arm: r.median_us
            for r in stored_figures.rows()
            if (r.point.context_tokens, r.point.batch) == (context, 8) and r.point.arm in ("tp", "cp")
        }
        assert gain == pytest.approx(us["tp"] - us["cp"], rel=1e-3)


def test_the_headline_names_the_measured_break_even(found):
    low, high = re.match(
        r"Turn context parallelism on where a decode step holds more than about (\S+) tokens .* below (\S+)\.",
        review.headline(found),
    ).groups()
    sums = [a.value * a.at for a in review.crossings(found.main)]
    assert sums and low == review.short(max(sums)) and high == review.short(min(sums))


@pytest.mark.parametrize(
    ("cp", "words"),
    [
        (DEAR, "Leave context parallelism off: tensor parallelism is faster at every"),
        (CHEAP, "Turn context parallelism on: it is faster wherever"),
    ],
)
def test_the_headline_of_rows_without_a_crossing(tmp_path, cp, words):
    made = review.gather(
        str(
            a_run(
                tmp_path / "node", synthetic.rows(cp=cp, contexts=(4096, 32_768, 131_072), batches=(1, 8), jitter=0.0)
            )
        )
    )
    assert review.headline(made).startswith(words)
    assert report.says_map(made)[0]


def test_the_answer_says_for_whom_what_and_how_sure(found):
    said = review.answer(found)
    assert said.index("verdict") < said.index("<dt>For") < said.index("<dt>Gives") < said.index("<dt>How sure")
    assert (
        "No engine&#x27;s own kernels have rows in this run" in said
        and "m3cp kernels, staged, NCCL; queries gathered" in said
    )
    pairs = found.main.pairs
    assert f"of {len(pairs)} measured points CP is faster at {(pairs['verdict'] == 'FASTER').sum()}" in said
    assert "unsteady" not in said and "no point was repeated in a fresh process" in said
    first = review.reference(found.main).iloc[-1]
    assert f"{first['delta_us'] * 57 / 1000:+.2f} ms at {first['batch']} ×" in said


def test_unsteady_rows_are_said_at_the_top(tmp_path):
    rows = [
        dataclasses.replace(r, unsteady=True) for r in synthetic.rows(contexts=(4096, 32_768, 131_072), batches=(1, 8))
    ]
    assert "12 of 12" not in review.sure(review.gather(str(a_run(tmp_path / "node", rows))))
    assert "<b>6 of 6 points are marked unsteady</b>" in review.sure(review.gather(str(tmp_path / "node")))


def test_gathered_comes_first_and_replicated_says_what_it_leaves_out(tmp_path):
    rows = list(synthetic.rows(contexts=(4096, 32_768, 131_072), batches=(1, 8)))
    rows += [
        dataclasses.replace(r, point=r.point.replace(queries="replicated"), timed_region=["score", "merge"])
        for r in rows
        if r.point.arm == "cp"
    ]
    made = review.gather(str(a_run(tmp_path / "node", rows)))
    assert [c.name for c in made.choices] == [
        "m3cp kernels, staged, NCCL; queries gathered",
        "m3cp kernels, staged, NCCL; queries replicated, projection not charged",
    ]
    charged = [
        dataclasses.replace(r, timed_region=["extra_projection", *r.timed_region])
        for r in rows
        if r.point.queries == "replicated"
    ]
    made = review.gather(
        str(a_run(tmp_path / "charged", [r for r in rows if r.point.queries != "replicated"] + charged))
    )
    assert [c.name for c in made.choices][1] == "m3cp kernels, staged, NCCL; queries replicated"


def engine_rows():
    rows = []
    for row in synthetic.rows(cp={**synthetic.CP, "launch": 20.0}, contexts=(4096, 32_768, 131_072), batches=(1, 8)):
        arm = f"vllm_{row.point.arm}"
        point = row.point.replace(arm=arm, form=None)
        label = {"engine": f"vLLM kernels, {'NCCL, ' if row.point.arm == 'cp' else ''}our glue"}
        best = {"best": {"setting": "wide", "median_us": 0.9 * row.median_us, "samples_us": row.samples_us}}
        rows.append(dataclasses.replace(row, point=point, path=arm, extra={**label, **best}))
    return rows


def test_engines_are_shown_by_name_where_they_have_rows(tmp_path):
    rows = [*synthetic.rows(contexts=(4096, 32_768, 131_072), batches=(1, 8)), *engine_rows()]
    made = review.gather(str(a_run(tmp_path / "node", rows)))
    assert "vLLM kernels, NCCL, our glue; queries gathered" in [c.name for c in made.choices]
    assert review.engines_text(made).startswith("vLLM kernels were measured in the same run")
    figure = report.every_arm(made)
    ticks = {t.get_text() for t in figure.axes[0].get_yticklabels()}
    assert {"TP: vLLM kernels, our glue", "CP: vLLM kernels, NCCL, our glue; queries gathered"} <= ticks
    assert "an engine at its best launch settings, measured" in [t.get_text() for t in figure.legends[0].get_texts()]
    assert "vLLM kernels, NCCL, our glue" in review.engine_table(made)


def test_switches_say_which_engine_can_here(found):
    said = review.switch_table(found)
    assert said.count("<tr>") == 1 + len(review.refusals(found)) and "CPOptions(enabled=True" in said
    for switch, why in review.refusals(found):
        assert why == switch.refuses("nvidia", 2, "bf16")


def test_no_engine_runs_on_a_cpu(tmp_path):
    for row in synthetic.rows(contexts=(4096, 32_768, 131_072), batches=(1, 8)):
        records.append(tmp_path / "cpu", dataclasses.replace(row, node="cpu: some model"))
    made = review.gather(str(tmp_path / "cpu"))
    assert [why for switch, why in review.refusals(made) if switch.vendor != "any"] == ["GPUs only"] * (
        len(review.refusals(made)) - 1
    )
    assert "gloo" in made.choices[0].name


def test_rows_of_another_bound_say_so(tmp_path):
    """An engine measured under a bound of its own meets our row of that bound; ours of another bound alone are named."""
    rows = list(synthetic.rows(contexts=(4096, 32_768, 131_072), batches=(1, 8)))
    tighter = [dataclasses.replace(r, point=r.point.replace(max_context=2**17)) for r in rows if r.point.arm == "tp"]
    engine = [dataclasses.replace(r, point=r.point.replace(max_context=2**17)) for r in engine_rows()]
    made = review.gather(str(a_run(tmp_path / "node", [*rows, *tighter, *engine])))
    ticks = [t.get_text() for t in report.every_arm(made).axes[0].get_yticklabels()]
    assert (
        "TP: m3cp kernels, staged" in ticks and "CP: m3cp kernels, staged, NCCL; queries gathered (bound 1M)" in ticks
    )
    assert not any("TP" in t and "bound" in t for t in ticks)


def test_parts_add_up_to_the_prediction(found):
    for model in found.main.models:
        for where in ((8192, 1), (131_072, 32)):
            spent = report.parts(model, *where)
            assert sum(spent.values()) == pytest.approx(model.us(model.point(*where)), rel=1e-9)


def test_every_term_of_the_model_has_a_stage():
    stages = {name: report.stage_of(name) for name in terms.TERMS}
    assert set(stages.values()) == set(report.STAGES)
    assert {name for name, stage in stages.items() if stage == report.EXCHANGE} == {
        n for n, t in terms.TERMS.items() if t.applies("cp", CHUNKS) and not t.applies("tp", CHUNKS)
    }
    assert stages["launch"] == report.FIXED and stages["bytes"] == report.READING


def test_other_numbers_of_ranks_say_what_they_assume(found):
    guess = report.wider(found.main.cp, 131_072, 8, 8)
    assert "assumed" in guess.assumed and guess.low_us < guess.us < guess.high_us
    words = [t.get_text() for t in report.scaling(found).legends[0].get_texts()]
    assert any("modelled" in w and "assumed" in w for w in words)
    assert (
        report.scaling(
            dataclasses.replace(
                found, run=dataclasses.replace(found.run, frame=found.run.frame[found.run.frame["arm"] != "page_read"])
            )
        )
        is None
    )


def test_traffic_is_answered_for(with_traffic):
    answer = review.judged(with_traffic, with_traffic.choices[0])
    said = review.answer(with_traffic)
    assert f"for mine.jsonl: it changes a layer&#x27;s indexing by {-answer.gain_us[0]:+.2f}" in said
    assert "60 steps judged" in said and "ms a token over 57 sparse layers" in said
    claim, note = report.says_traffic(with_traffic)
    assert claim.startswith("mine.jsonl: ") and "distinct" in note
    figure = report.traffic_map(with_traffic)
    counted = sum(len(line.get_xdata()) for line in figure.axes[0].lines if line.get_label().endswith("steps"))
    assert counted == 60


def test_short_traffic_is_told_to_leave_it_off_and_unmeasured_traffic_nothing(run, tmp_path):
    short = workload.write(tmp_path / "short.jsonl", [workload.Step((5000,)) for _ in range(20)])
    assert review.headline(review.gather(str(run), str(short))).startswith(
        "Leave context parallelism off for short.jsonl"
    )
    long = workload.write(tmp_path / "long.jsonl", [workload.Step((1 << 20,) * 64)])
    assert (
        review.headline(review.gather(str(run), str(long)))
        == "Undecided for long.jsonl: all of its 1 steps lie outside what was measured."
    )
    few = workload.write(tmp_path / "few.jsonl", [workload.Step((1 << 20,) * 64)] * 3 + [workload.Step((60_000,))])
    assert review.headline(review.gather(str(run), str(few))).startswith(
        "Undecided for few.jsonl: 3 of its 4 steps lie outside"
    )
    with pytest.raises(ValueError, match="no traffic was given"):
        report.traffic_map(review.gather(str(run)))


def test_other_machines_rows_are_left_out_and_counted(tmp_path):
    rows = synthetic.rows(contexts=(4096, 32_768, 131_072), batches=(1, 8))
    rows += [dataclasses.replace(r, node="another") for r in rows[:3]]
    made = review.gather(str(a_run(tmp_path / "node", rows)))
    assert made.left_out == 3 and set(made.run.frame["node"]) == {"synthetic 2x H200"}
    assert "3 rows of other machines" in review.provenance(made)


def test_rows_that_decide_nothing_are_refused_in_words(tmp_path):
    few = a_run(tmp_path / "few", synthetic.rows(contexts=(8192,), batches=(1,)))
    done = CliRunner().invoke(cli.app, ["report", "--node", str(few), "--out", str(tmp_path / "out")], prog_name="m3cp")
    assert (
        done.exit_code == 1
        and "nothing to decide" in done.output
        and "Traceback (most recent" not in done.output.split("m3cp report:")[0]
    )


def test_a_bad_line_of_traffic_is_told_before_anything_starts(run, tmp_path):
    (tmp_path / "bad.jsonl").write_text("[1, 2]\nseven\n")
    done = CliRunner().invoke(
        cli.app,
        ["report", "--node", str(run), "--traffic", str(tmp_path / "bad.jsonl"), "--out", str(tmp_path / "out")],
        prog_name="m3cp",
    )
    assert done.exit_code == 1 and "bad.jsonl, line 2" in done.output and not (tmp_path / "out").exists()


def test_the_default_node_has_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(frames, "ROOT", tmp_path)
    with pytest.raises(FileNotFoundError, match="no run on GPUs"):
        frames.default_node()
    rows = synthetic.rows(contexts=(8192,), batches=(1,))
    a_run(tmp_path / "data" / "measured" / "node", rows)
    for row in rows:
        records.append(tmp_path / "data" / "runs" / "on-the-cpu", row)
    assert frames.default_node().endswith("measured/node")
    a_run(tmp_path / "data" / "runs" / "on-gpus", rows)
    assert frames.default_node().endswith("runs/on-gpus")


def test_a_figure_is_numbered_claimed_and_embedded(found, tmp_path):
    book = report.Figures(found, tmp_path)
    shown = book.show(report.where_map(found.main, "x"), "map", "CP pays & so on", "a note <here>")
    assert "<b>Figure 1. CP pays &amp; so on</b> a note &lt;here&gt;" in shown and "data:image/svg+xml;base64," in shown
    assert sorted(p.name for p in tmp_path.iterdir()) == ["01_map.png", "01_map.svg"]


@pytest.fixture(scope="module")
def page(run, traffic, tmp_path_factory):
    """What `make report` with a traffic writes: (folder, what it printed)."""
    out = tmp_path_factory.mktemp("report")
    (out / "figures").mkdir()
    (out / "figures" / "09_old.svg").write_text("from an earlier page")
    options = f"--node {run} --traffic {traffic} --out {out}"
    command = ["make", "-C", str(frames.ROOT), "report", f"PY={sys.executable}", "SETUP=true", f"ARGS={options}"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": str(frames.ROOT)}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done.stdout


def test_the_page_is_whole_and_answers_first(page):
    out, said = page
    text = (out / "report.html").read_text()
    assert "report.html" in said and "9 figures" in said
    order = ['class="verdict"', "for mine.jsonl", 'id="traffic"', 'id="map"', 'id="gains"', 'id="arms"', 'id="breakdown"', 'id="scaling"',
             'id="engines"', 'id="break_even"', 'id="published"', "How good the prediction is", "Reads are saved, not capacity", "Not a throughput claim",
             "Where the figures come from", "m3cp report --node synthetic-node --traffic mine.jsonl"]  # fmt: skip
    places = [text.index(words) for words in order]
    assert places == sorted(places)
    assert "Traceback" not in text and "settings =" not in text and "import report" not in text  # code is hidden
    assert "figures  '" not in text  # and so is the parameters' table


def test_the_page_needs_nothing_from_anywhere(page):
    text = (page[0] / "report.html").read_text()
    assert not re.search(r"<script|<link|<iframe|@import|url\(", re.sub(r"base64,[A-Za-z0-9+/=]+", "", text))
    sources = re.findall(r"<img[^>]*?src=['\"]([^'\"]{0,40})", text)
    assert len(sources) == 9 and all(s.startswith("data:image/svg+xml;base64,") for s in sources)
    assert len(text) < 4_000_000


@pytest.mark.browser
def test_the_page_in_a_browser(page):
    """On a desk and on a tablet: no error, nothing fetched, every picture shown, nothing wider than the window."""
    from playwright import sync_api

    chromium = shutil.which("chromium") or pytest.skip("needs chromium, found none")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        for width in (1280, 820):
            tab, said, asked = browser.new_page(viewport={"width": width, "height": 1000}), [], []
            tab.on("console", lambda message, said=said: said.append(message.text))
            tab.on("pageerror", lambda error, said=said: said.append(str(error)))
            tab.on("request", lambda request, asked=asked: asked.append(request.url))
            tab.goto((page[0] / "report.html").as_uri())
            assert said == [] and [url for url in asked if not url.startswith("data:")] == [
                (page[0] / "report.html").as_uri()
            ]
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            assert tab.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 100)")
            assert tab.locator(".verdict").bounding_box()["y"] < 400  # the answer is on the first screen
            tab.screenshot(path=str(page[0] / f"page_{width}.png"), full_page=True)
        browser.close()
    assert (page[0] / "page_1280.png").stat().st_size > 50_000


def test_the_figures_stand_alone_too(page):
    names = sorted(p.name for p in (page[0] / "figures").iterdir())
    stems = ["traffic", "map", "gains", "arms", "breakdown", "scaling", "engines", "break_even", "published"]
    assert names == sorted(f"{i:02d}_{stem}.{ending}" for i, stem in enumerate(stems, 1) for ending in ("svg", "png"))
    assert all((page[0] / "figures" / n).stat().st_size > 5000 for n in names)


def test_every_number_of_a_measured_cell_is_in_the_table(found):
    """The gain table's measured columns are the pairs', not the model's."""
    text = review.gain_table(found)
    for _, pair in review.reference(found.main).iterrows():
        assert f"<td class='n'>{pair['tp_us']:.1f}</td>" in text and f"<td class='n'>{pair['cp_us']:.1f}</td>" in text


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (37_800, "37k"),
        (1024, "1k"),
        (9_400, "9.2k"),
        (700_000, "684k"),
        (3 << 20, "3M"),
        (1.5 * 2**20, "1.5M"),
        (0, "0"),
    ],
)
def test_tokens_in_two_digits(tokens, words):
    assert review.short(tokens) == words


def test_words_in_tables_are_escaped():
    assert review.table(["<a>"], [["$ rm <x>", "1 & 2"]], "n < 3") == (
        "<div class='table'><table><thead><tr><th>&lt;a&gt;</th></tr></thead><tbody><tr><td><code>rm &lt;x&gt;</code></td><td class='n'>1 &amp; 2</td></tr></tbody></table></div>"
        "<p class='note'>n &lt; 3</p>"
    )


def test_measured_and_modelled_never_share_a_mark(found):
    """In the gains: squares are the pairs, dashes the floors, and the model is a dashed line."""
    for axis in report.gains(found.main).axes:
        kinds = {(line.get_marker(), line.is_dashed()) for line in axis.lines if len(line.get_xdata()) > 2}
        assert kinds <= {("s", False), ("_", False), ("None", True)} and ("None", True) in kinds


def test_no_words_leave_the_figures(found, with_traffic):
    drawn = [
        report.gains(found.main),
        report.breakdown(found.main),
        report.scaling(found),
        report.every_arm(found),
        report.beside_published(found),
        report.traffic_map(with_traffic),
    ]
    for number, figure in enumerate(drawn):
        figure.draw_without_rendering()
        width, height = figure.get_size_inches() * figure.dpi
        for legend in figure.legends:
            box = legend.get_window_extent()
            assert box.x0 >= -1 and box.x1 <= width + 1 and box.y0 >= -1 and box.y1 <= height + 1, number
        for axis in figure.axes:
            for label in (axis.xaxis.label, axis.yaxis.label, axis.title, axis._left_title):
                box = label.get_window_extent()
                assert not label.get_text() or (box.x0 >= -1 and box.x1 <= width + 1 and np.isfinite(box.y0)), (
                    number,
                    label.get_text(),
                )


def test_the_file_is_clean():
    """No outputs, no counts, a python3 kernel, literals in the parameters cell, short cells."""
    import ast

    book = nbformat.read(str(NOTEBOOK), as_version=4)
    assert book.metadata.kernelspec.name == "python3" and "widgets" not in book.metadata
    assert len({c.id for c in book.cells}) == len(book.cells)
    code = [c for c in book.cells if c.cell_type == "code"]
    assert all(not c.outputs and c.execution_count is None and len(c.source.splitlines()) <= 12 for c in code)
    (cell,) = [c for c in code if "parameters" in c.metadata.get("tags", [])]
    for statement in ast.parse(cell.source).body:
        ast.literal_eval(statement.value)
