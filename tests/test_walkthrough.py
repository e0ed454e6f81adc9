"""The walkthrough teaches what the package computes: it runs headless, and its pictures are the stored ones."""

import json

import nbformat
import notebook_cells
import numpy as np
import pytest
import stored_figures
import synthetic

from m3cp import frames, lesson, notebook, records, reference
from m3cp.shapes import IndexerShape

NOTEBOOK = notebook.FOLDER / "01_walkthrough.ipynb"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "synthetic-node"
    for row in synthetic.rows(contexts=(4096, 8192, 16_384, 32_768, 131_072), batches=(1, 8)):
        records.append(folder, row)
    return folder


@pytest.fixture(scope="module")
def found(run):
    return lesson.recorded(str(run))


@pytest.mark.parametrize("name", [n for n in stored_figures.FIGURES if n.startswith("walkthrough")])
def test_pictures_are_the_stored_ones(name):
    stored = json.loads((stored_figures.STORED / f"{name}.json").read_text())
    assert stored_figures.same(stored_figures.facts(stored_figures.FIGURES[name]()), stored) == []


def test_a_changed_picture_is_noticed():
    stored = json.loads((stored_figures.STORED / "walkthrough_merge.json").read_text())
    row = stored_figures.toy_scores()[2]
    changed = lesson.merging(row, [[0], [1], [2], [3]], [0, 1, 2, 3], head=2)
    assert any("boxes" in difference for difference in stored_figures.same(stored_figures.facts(changed), stored))
    nudged = json.loads(json.dumps(stored))
    nudged["axes"][0]["boxes"][1][3] *= 1.01
    assert len(stored_figures.same(nudged, stored)) == 1


def test_it_runs_headless_and_ends_with_three_answers(run, tmp_path):
    figures = tmp_path / "figures"
    names = ("1_pages", "2_scores", "3_selection", "4_keys", "5_shards", "6_merge", "7_cost")
    done = notebook.run_notebook(
        "01_walkthrough", {"run": str(run), "figures": str(figures), "world": 2}, tmp_path / "out.ipynb",
        expect=[figures / f"walkthrough_{name}.{ending}" for name in names for ending in ("svg", "png")], progress=False,
    )  # fmt: skip
    book = nbformat.read(str(done), as_version=4)
    streams = [o for c in book.cells if c.cell_type == "code" for o in c.outputs if o.output_type == "stream"]
    said = "\n".join(o.text for o in streams if o.name == "stdout")
    assert "CP's choice is TP's, id for id" in said
    assert said.index("by hand") < said.index("fitted") < said.index("measured  at batch 8")
    assert not any("Warning" in o.text for o in streams if o.name == "stderr")


def test_one_rank_has_nothing_to_share():
    """The notebook's own cells refuse it, before anything is drawn."""
    with pytest.raises(ValueError, match="world=1: input should be greater than or equal to 2"):
        notebook_cells.run("01_walkthrough", "resolve", world=1)


def test_the_toy_has_something_to_teach():
    """Winners that differ by head, a tie among them, a partly empty last block, and enough that is not chosen."""
    shape = IndexerShape(heads=4, head_dim=64, block_size=64, topk=4)
    q, cache, table, lengths = lesson.toy(shape, 1516)
    ids = reference.select_blocks(q, cache, table, lengths, shape=shape)[:, 0]
    assert len({tuple(row) for row in ids.tolist()}) == 4 and (ids[:, -1] == 23).all()
    dots = cache[table[0].long()].float() @ q[0].float().T  # [blocks, tokens, heads]
    best = dots.amax(1)[:-1]  # [blocks, heads]
    ties = [len(set(best[ids[h, :3].long(), h].tolist())) < 3 for h in range(4)]
    assert any(ties)
    again = lesson.toy(shape, 1516)
    assert all((a == b).all() for a, b in zip((q, cache, table, lengths), again, strict=True))


def test_the_line_by_hand_crosses_where_its_own_arithmetic_says(found):
    hand = lesson.by_hand(found, 8)
    point = found.cp.template
    bytes_a_token = point.shape.key_bytes("bf16") / point.shape.block_size
    saved_us = 8 * hand.break_even_tokens * bytes_a_token * (1 - 1 / 2) / hand.gbs / 1e3
    assert saved_us == pytest.approx(hand.cp_fixed_us - hand.tp_fixed_us, rel=1e-9)
    near = round(hand.break_even_tokens / 256) * 256
    gap = [hand.us(model, near) for model in (found.tp, found.cp)]
    assert gap[0] == pytest.approx(gap[1], abs=0.3)
    first = found.pairs[(found.pairs["batch"] == 8) & found.pairs["read"]].sort_values("context_tokens").iloc[0]
    assert hand.us(found.cp, int(first["context_tokens"])) == pytest.approx(
        first["cp_us"], rel=1e-3
    )  # a row it was drawn through
    with pytest.raises(ValueError, match="batch=3: no row"):
        lesson.by_hand(found, 3)


def test_the_last_picture_shows_hand_fit_and_rows(found):
    figure = lesson.hand_and_fit(found, lesson.by_hand(found, 8))
    words = [t.get_text() for t in figure.legends[0].get_texts()]
    assert {w.split(", ")[1].split(":")[0] for w in words} == {"measured", "fitted", "by hand"}
    wobbly = [line for line in figure.axes[0].lines if line.get_sketch_params()]
    measured = [line for line in figure.axes[0].lines if line.get_linestyle() == "None"]
    assert len(wobbly) == 2 and len(measured) == 2
    np.testing.assert_allclose(
        measured[0].get_ydata(), found.pairs[found.pairs["batch"] == 8].sort_values("context_tokens")["tp_us"]
    )


def test_a_run_without_a_comparison_is_refused(tmp_path):
    for row in synthetic.rows(contexts=(8192,), batches=(1,)):
        records.append(tmp_path / "small", row)
    with pytest.raises(ValueError, match="over three sizes"):
        lesson.recorded(str(tmp_path / "small"))


def test_the_default_is_the_first_recorded_node(monkeypatch):
    first = sorted((frames.ROOT / "data" / "measured").glob("*/rows.jsonl"))[0].parent
    asked = []
    monkeypatch.setattr(frames, "load_run", asked.append)
    with pytest.raises(AttributeError):  # nothing was loaded
        lesson.recorded("")
    assert asked == [str(first)]


def test_the_file_is_clean():
    """No outputs, no counts, a python3 kernel, literals in the parameters cell, short cells."""
    import ast

    book = nbformat.read(str(NOTEBOOK), as_version=4)
    assert book.metadata.kernelspec.name == "python3" and "widgets" not in book.metadata
    assert len({c.id for c in book.cells}) == len(book.cells)
    code = [c for c in book.cells if c.cell_type == "code"]
    assert all(not c.outputs and c.execution_count is None and len(c.source.splitlines()) <= 14 for c in code)
    (cell,) = [c for c in code if "parameters" in c.metadata.get("tags", [])]
    for statement in ast.parse(cell.source).body:
        ast.literal_eval(statement.value)
