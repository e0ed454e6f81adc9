"""Figures: what they refuse, that their words fit, and that saving is stamped and reproducible."""

import dataclasses
import xml.etree.ElementTree as ElementTree

import matplotlib
import numpy as np
import pytest
import synthetic
from matplotlib.text import Text

from m3cp import crossover, frames, plots


@pytest.fixture(scope="module")
def found():
    return crossover.headline(
        crossover.comparisons(frames.table(synthetic.rows(noise=0.01), source="synthetic"), draws=100)
    )


@pytest.fixture(scope="module")
def published():
    return crossover.headline(crossover.comparisons(frames.published(), noise=0.05, draws=100))


@pytest.fixture(scope="module")
def little():
    return frames.table(synthetic.rows(contexts=(8192, 32_768), batches=(1,)))


def texts(figure):
    """Visible texts with something in them, after a draw."""
    figure.canvas.draw()
    return [
        t
        for t in figure.findobj(Text)
        if t.get_visible() and t.get_text().strip() and (t.axes is None or t.axes.get_visible())
    ]


def words(figure):
    return "\n".join(t.get_text() for t in texts(figure))


def assert_words_fit(figure):
    """Every text lies on the canvas, and the words in a map's cells don't touch each other."""
    bounds = figure.bbox
    cells = []
    for text in texts(figure):
        box = text.get_window_extent()
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= bounds.x1 + 1 and box.y1 <= bounds.y1 + 1, text.get_text()
        if text.figure.legends and text in text.figure.legends[0].get_texts():
            assert box.x1 < bounds.x1 - 4, text.get_text()
        if text.axes is not None and text.get_text()[:3] in ("TP ", "CP ", "≈ ") and text in text.axes.texts:
            cells.append(box)
    for i, a in enumerate(cells):
        assert not any(a.overlaps(b) for b in cells[i + 1 :])


def drawn(found, published):
    one, other = (
        plots.panel(found, "measured here: synthetic 2x H200"),
        plots.panel(published, "published: 4x MI355X, SGLang"),
    )
    yield plots.maps([one], "Where CP beats TP")
    yield plots.maps([other])
    yield plots.maps([one, other], "Where CP beats TP")
    yield plots.curves(found.frame, found.models, "synthetic")
    yield plots.curves(published.frame, published.models)
    rows = synthetic.rows(contexts=(1024, 8192, 32_768), batches=(1,))  # every arm of a sweep in one narrow figure
    cp = [r for r in rows if r.point.arm == "cp"]
    rows += [dataclasses.replace(r, point=r.point.replace(queries="replicated")) for r in cp]
    rows += [
        dataclasses.replace(r, point=r.point.replace(arm="cp_local", exchange=None, queries=None), path="cp_local")
        for r in cp
    ]
    for _, mine, models in crossover.curve_sets(frames.table(rows)):
        yield plots.curves(mine, models, "measured here")


def test_words_fit_and_the_same_figure_gives_the_same_bytes(found, published, tmp_path):
    for number, figure in enumerate(drawn(found, published)):
        if number == 0:
            again = plots.maps([plots.panel(found, "measured here: synthetic 2x H200")], "Where CP beats TP")
            once, twice = (
                plots.save(f, "map", run="r", commit="c" * 40, folder=tmp_path / str(i))
                for i, f in enumerate((figure, again))
            )
            assert [p.read_bytes() for p in once] == [p.read_bytes() for p in twice]
            text = once[0].read_text()
            ElementTree.fromstring(text)
            assert "<dc:date>" not in text
        assert_words_fit(figure)


def test_a_figure_names_its_run_and_commit(little, tmp_path):
    figure = plots.curves(little)
    paths = plots.save(figure, "curves", run="20260101-first", commit="abc123", folder=tmp_path / "deep" / "er")
    assert [p.name for p in paths] == ["curves.svg", "curves.png"]
    assert "20260101-first" in words(figure) and "commit abc123" in words(figure)
    plots.save(figure, "curves", run="another", commit="def", folder=tmp_path)
    assert "20260101-first" not in words(figure) and "another" in words(figure)


def test_callers_settings_neither_matter_nor_change(little, tmp_path):
    plain = plots.save(plots.curves(little), "plain", run="r", commit="c", folder=tmp_path)[0].read_bytes()
    with matplotlib.rc_context({"font.size": 30, "svg.fonttype": "none", "lines.linewidth": 9}):
        before = dict(matplotlib.rcParams)
        again = plots.save(plots.curves(little), "again", run="r", commit="c", folder=tmp_path)[0].read_bytes()
        assert dict(matplotlib.rcParams) == before
    assert plain == again


@pytest.mark.parametrize(("name", "run"), [("a/b", "r"), ("", "r"), ("x.svg", "r"), ("x", "")])
def test_save_refuses(little, tmp_path, name, run):
    with pytest.raises(ValueError, match="name=|run="):
        plots.save(plots.curves(little), name, run=run, commit="c", folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_measured_modelled_computed_and_published_have_their_own_marks(found, published):
    measured, theirs = plots.curves(found.frame, found.models), plots.curves(published.frame, published.models)
    legend = [t.get_text() for t in measured.legends[0].get_texts()]
    assert "TP staged: measured" in legend and "TP staged: fit" in legend
    assert any("limit: bytes over bandwidth, computed" in t for t in legend) and any(
        "page read: measured floor" in t for t in legend
    )
    assert "published" not in words(measured)
    legend = [t.get_text() for t in theirs.legends[0].get_texts()]
    assert "SGLang TP: published" in legend and not any("measured" in t for t in legend)
    marks = {
        line.get_markerfacecolor()
        for axis in theirs.axes
        for line in axis.lines
        if line.get_marker() not in ("None", None, "")
    }
    assert marks == {"none"}  # hollow
    assert "published  ·  P = 4" in words(plots.maps([plots.panel(published, "p")]))


def test_a_map_survives_black_and_white(found, published):
    figure = plots.maps([plots.panel(found, "a"), plots.panel(published, "b")])
    said = words(figure)
    for pair in [*found.pairs.to_dict("records"), *published.pairs.to_dict("records")]:
        assert plots.cell_words(pair) in said
    hatched = [p for axis in figure.axes[:2] for p in axis.patches if p.get_hatch() == "////"]
    slower = sum(
        int(((p["ratio"] < 1) & ~p["verdict"].isin(["UNDECIDED", "SAME"])).sum())
        for p in (found.pairs, published.pairs)
    )
    assert len(hatched) == slower > 0


@pytest.mark.parametrize(
    ("ratio", "verdict", "said"),
    [(1.5, "FASTER", "CP 1.50×"), (0.5, "SLOWER", "TP 2.00×"), (1.04, "UNDECIDED", "≈ 1.04"), (0.99, "SAME", "≈ 0.99")],
)
def test_cell_words(ratio, verdict, said):
    assert plots.cell_words({"ratio": ratio, "verdict": verdict}) == said


def test_different_experiments_never_share_a_plot(found):
    rows = synthetic.rows()
    for change in (
        {"node": "another"},
        {"provenance": {"code_hash": "other"}},
        {"timed_region": ["score", "attention"]},
    ):
        edited = [*rows[:-1], dataclasses.replace(rows[-1], **change)]
        with pytest.raises(ValueError, match="different experiments"):
            plots.curves(frames.table(edited))
    with pytest.raises(ValueError, match="mix"):
        plots.curves(frames.table(rows + synthetic.rows(mix="log_uniform")))
    mixed = crossover.pairs(frames.table(rows + synthetic.rows(world=4)))
    with pytest.raises(ValueError, match="world: 2, 4"):
        plots.maps([plots.Panel("both", mixed)])
    with pytest.raises(ValueError, match="at least one pair"):
        plots.maps([])


def test_warm_points_are_hollow_beside_cold_ones():
    rows = synthetic.rows(contexts=(8192, 32_768), batches=(1,))
    rows[0] = dataclasses.replace(rows[0], cache_state="warm")
    figure = plots.curves(frames.table(rows))
    assert "hollow: warm cache" in words(figure)
    faces = [line.get_markerfacecolor() for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert faces.count("white") == 1


def test_unsteady_pairs_are_starred(found):
    rows = [dataclasses.replace(r, unsteady=True) for r in synthetic.rows(contexts=(8192, 32_768), batches=(1, 8))]
    said = words(plots.maps([plots.panel(crossover.comparisons(frames.table(rows), draws=50)[0], "x")]))
    assert "×*" in said and "drifted by over 3%" in said


def test_one_cell_and_many_cells_draw():
    small = crossover.comparisons(frames.table(synthetic.rows(contexts=(32_768,), batches=(8,))), draws=50)[0]
    wide = crossover.comparisons(
        frames.table(
            synthetic.rows(contexts=tuple(1024 * 2**i for i in range(11)), batches=(1, 2, 4, 8, 16, 32, 64, 128, 256))
        ),
        draws=50,
    )[0]
    for comparison in (small, wide):
        figure = plots.maps([plots.panel(comparison, "measured here")])
        assert_words_fit(figure)


def test_figures_do_not_leak_into_pyplot(little):
    import matplotlib.pyplot

    before = matplotlib.pyplot.get_fignums()
    plots.curves(little)
    assert matplotlib.pyplot.get_fignums() == before


def test_a_fit_is_not_drawn_where_no_key_is_read(found):
    lines = [line for line in plots.curves(found.frame, found.models).axes[0].lines if line.get_linestyle() == "--"]
    assert len(lines) == 2 and all(min(line.get_xdata()) > 16 * 128 for line in lines)


def test_colours_of_the_map_are_told_apart_by_dichromats():
    """The two ends keep their distance for red-green blindness (matrices of Viénot, Brettel and Mollon, 1999)."""
    ends = np.array([matplotlib.colors.to_rgb(c) for c in (plots.TP_COLOUR, plots.CP_COLOUR)]) ** 2.2
    for matrix in (
        [[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]],
        [[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]],
    ):
        seen = np.clip(ends @ np.array(matrix).T, 0, 1)
        assert np.linalg.norm(seen[0] ** (1 / 2.2) - seen[1] ** (1 / 2.2)) > 0.4
