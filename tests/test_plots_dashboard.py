"""The explorer's picture: frozen layout, words that fit, marks that keep measured, modelled and published apart."""

import dataclasses
import io

import numpy as np
import pytest
from matplotlib.artist import Artist
from matplotlib.text import Text
from PIL import Image
from test_widgets_explore import START, explorer

from m3cp import dashboard, plots
from m3cp.terms import TERMS

VIEWS = {
    "start": {}, "what if": {"exchange_us": 12.5, "bandwidth": 1.65}, "wide": {"world": 8, "batch": 1}, "absent": {"dtype": "fp8_e4m3fnuz"},
    "mix": {"mix": "one_long_rest_1k", "batch": 32}, "most": {"mix": "one_long_rest_1k", "exchange_us": -9.5, "bandwidth": 1.65, "batch": 256}, "far": {"context_tokens": 1 << 20, "batch": 256}, "short": {"context_tokens": 1024},
    "here": {"node": "here"}, "published": {"node": "published", "world": 4, "dtype": "fp8_e4m3fn", "way": "sglang/collective"},
}  # fmt: skip


@pytest.fixture(scope="module")
def board():
    return dashboard.Dashboard()


def seen(name):
    return explorer().view(dataclasses.replace(START, **VIEWS[name]))


def pixels(board):
    return np.asarray(Image.open(io.BytesIO(board.png())))


def test_nothing_is_made_or_moved_by_a_redraw(board):
    board.show(seen("start"))
    first = pixels(board)
    artists = {id(a) for a in board.figure.findobj(Artist) if not isinstance(a, Text)}
    places = [axis.get_position().bounds for axis in board.figure.axes]
    for name in VIEWS:
        board.show(seen(name))
        picture = pixels(board)
        assert picture.shape == (dashboard.HEIGHT, dashboard.WIDTH, 3)
        for legend in (board.curve_legend, board.map_legend):
            box = legend.get_window_extent().expanded(0.9, 0.9)
            rows = slice(int(dashboard.HEIGHT - box.y1), int(dashboard.HEIGHT - box.y0))
            part = (rows, slice(int(box.x0), int(box.x1)))
            assert (picture[part] == first[part]).all() and (picture[part] < 250).any()
    assert [axis.get_position().bounds for axis in board.figure.axes] == places
    made = {id(a) for a in board.figure.findobj(Artist) if not isinstance(a, Text)} - artists
    assert len(made) < 60  # ticks that a new scale needs, never bars or lines; bounded however often it is drawn
    board.show(seen("start"))
    assert (pixels(board) == first).all()


def test_a_saved_picture_has_all_that_the_shown_one_has(tmp_path):
    board = dashboard.Dashboard()  # its own: saving draws at another resolution
    board.show(seen("start"))
    shown = pixels(board)
    svg, png = plots.save(board.figure, "explorer", run="r", commit="c", folder=tmp_path)
    saved = np.asarray(Image.open(png).convert("RGB").resize((dashboard.WIDTH, dashboard.HEIGHT)))
    zones = {"title": (slice(5, 30), slice(10, 700)), "bars": (slice(565, 650), slice(60, 250)), "swatches": (slice(545, 640), slice(605, 900))}
    for name, zone in zones.items():
        assert abs(float(saved[zone].mean()) - float(shown[zone].mean())) < 4 and (saved[zone] < 200).any(), name
    assert svg.stat().st_size > 10_000


@pytest.mark.parametrize("name", VIEWS)
def test_words_fit(board, name):
    board.show(seen(name))
    board.png()
    width, height = dashboard.WIDTH, dashboard.HEIGHT
    axes = [axis for of in board.figure.axes for axis in (of.xaxis, of.yaxis)]
    ticks = {id(t) for axis in axes for tick in (*axis.majorTicks, *axis.minorTicks) for t in (tick.label1, tick.label2)}  # some beyond the view
    for text in board.figure.findobj(Text):
        if text.get_visible() and text.get_text().strip() and (text.axes is None or text.axes.get_visible()):
            box = text.get_window_extent()
            inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1
            assert inside or id(text) in ticks, (text.get_text(), box)
    gap = board.map_title.get_window_extent().x0 - board.curves_title.get_window_extent().x1
    assert gap > 4, (board.curves_title.get_text(), gap)
    gap = board.shades_title.get_window_extent().x0 - board.map_title.get_window_extent().x1
    assert gap > 4, (board.map_title.get_text(), gap)


def test_marks_tell_measured_modelled_and_published_apart(board):
    board.show(seen("start"))
    tp = board.lines["tp"]
    assert tp["points"].get_markerfacecolor() == plots.TP_COLOUR and tp["points"].get_alpha() == 1.0
    assert tp["model"].get_linestyle() == "--" and tp["limit"].get_linestyle() == ":" and tp["points"].get_linestyle() == "None"
    board.show(seen("what if"))
    assert tp["points"].get_alpha() < 0.5 and "WHAT IF" in board.curves_title.get_text()
    board.show(seen("published"))
    assert tp["points"].get_markerfacecolor() == "none" and "published" in board.measured["tp"][2].get_text()
    board.show(seen("wide"))
    assert "P = 8 assumed" in board.map_title.get_text() and not len(tp["points"].get_xdata())


def test_the_artists_hold_the_view(board):
    view = seen("start")
    board.show(view)
    read = np.isfinite(view.cp.us)
    np.testing.assert_array_equal(board.lines["cp"]["model"].get_ydata(), view.cp.us[read])
    assert (board.star.get_xdata()[0], board.star.get_ydata()[0]) == (131_072, 8)
    np.testing.assert_array_equal(board.mesh.get_array().reshape(view.plane.ratio.shape).filled(np.nan), view.plane.ratio)
    right = max(bar.get_x() + bar.get_width() for bar in board.bars["cp"].values())
    assert right == pytest.approx(sum(view.cp.parts.values()))
    assert board.lines["cp"]["ring"].get_ydata()[0] == pytest.approx(view.cp.points[view.cp.points[:, 0] == 131_072][0, 1])
    board.show(seen("absent"))
    assert "Not measured here" in board.absent.get_text() and not len(board.lines["cp"]["model"].get_xdata())
    assert all(bar.get_width() == 0 for bar in board.bars["cp"].values()) and not len(board.lines["cp"]["ring"].get_xdata())


def test_every_term_has_a_style_of_its_own():
    assert list(dashboard.TERM_STYLE) and set(TERMS) <= set(dashboard.TERM_STYLE)
    assert len(set(dashboard.TERM_STYLE.values())) == len(dashboard.TERM_STYLE)
    assert not {colour for colour, _ in dashboard.TERM_STYLE.values()} & {plots.TP_COLOUR, plots.CP_COLOUR}


@pytest.mark.parametrize(("value", "up", "down"), [(3.0, 5.0, 2.0), (5.0, 5.0, 5.0), (0.11, 0.2, 0.1), (1000.0, 1000.0, 1000.0), (990, 1000, 500)])
def test_scales_snap(value, up, down):
    assert dashboard._snap(value, True) == pytest.approx(up) and dashboard._snap(value, False) == pytest.approx(down)
