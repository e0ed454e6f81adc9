"""The explorer's controls: what is moved is shown, once for moves in quick succession, and errors are said."""

import asyncio
import dataclasses

import pytest
import yaml
from test_widgets_explore import START, explorer

from m3cp import widgets
from m3cp.explore import State


@pytest.fixture
def controls(tmp_path):
    return widgets.Controls(explorer(), START, tmp_path / "runs" / "state.yaml")


def test_moving_changes_state_picture_words_and_yaml(controls):
    before = controls.picture.value
    assert before[:4] == b"\x89PNG"
    for name, value in (("batch", 1), ("context_tokens", 8192), ("world", 4), ("exchange_us", 4.0), ("bandwidth", 1.2)):
        picture, words = controls.picture.value, controls.words.value
        (controls.sliders.get(name) or controls.choosers[name]).value = value
        assert controls.picture.value != picture and controls.words.value != words, name
        assert getattr(controls.state, name) == value
    assert State.of(yaml.safe_load(controls.yaml.value)["state"]) == controls.state
    controls.reset.click()
    assert not controls.state.asks and controls.sliders["exchange_us"].value == 0 and controls.sliders["bandwidth"].value == 1


def test_a_browsers_rounding_asks_nothing(controls):
    controls.sliders["bandwidth"].value = 1.0000000000000002
    assert controls.state.bandwidth == 1 and not controls.state.asks


def test_choosing_a_node_moves_to_what_it_has_and_says_so(controls):
    controls.choosers["node"].value = "published"
    assert (controls.state.world, controls.state.dtype) == (4, "fp8_e4m3fn")
    assert "Moved to what was measured on this node: world 4, dtype fp8_e4m3fn, way sglang/collective." in controls.words.value
    assert controls.choosers["world"].value == 4 and controls.choosers["way"].value == "sglang/collective"
    controls.sliders["batch"].value = 16
    assert "Moved to" not in controls.words.value
    controls.choosers["node"].value = "here"
    assert "make sweep" in controls.words.value and controls.state.node == "here"


def test_choosing_what_was_not_measured_says_so(controls):
    controls.choosers["dtype"].value = "fp16"
    assert "Not measured here" in controls.words.value and controls.state.dtype == "fp16"
    assert dict(controls.choosers["dtype"].options)["fp16 – not measured here"] == "fp16"


def test_errors_stand_where_the_answer_would(controls, monkeypatch):
    monkeypatch.setattr(controls.found, "view", lambda state: 1 / 0)
    controls.sliders["batch"].value = 64
    assert "ZeroDivisionError" in controls.words.value


def test_moves_in_quick_succession_are_drawn_once_and_the_last_one_counts(controls, monkeypatch):
    drawn, real = [], controls.dashboard.show
    monkeypatch.setattr(controls.dashboard, "show", lambda view: (drawn.append(view.state), real(view)))

    async def drag():
        for batch in (1, 2, 4, 16, 32, 64):
            controls.sliders["batch"].value = batch
        assert not drawn
        await asyncio.sleep(4 * widgets.SETTLE_S)
        controls.sliders["batch"].value = 128
        await asyncio.sleep(4 * widgets.SETTLE_S)

    asyncio.run(drag())
    assert [state.batch for state in drawn] == [64, 128] and controls.sliders["batch"].value == 128


def test_saving_writes_what_the_notebooks_take(controls):
    controls.move(context_tokens=8192, exchange_us=1.5)
    controls.save.click()
    assert yaml.safe_load(controls.save_to.read_text()) == {"state": dataclasses.asdict(controls.state)}
    assert str(controls.save_to) in controls.saved.value
    controls.save_to = controls.save_to / "not a folder" / "x"
    controls.save.click()
    assert "not saved" in controls.saved.value


def test_without_ipywidgets_it_says_so(monkeypatch, capsys):
    import sys

    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert widgets.explorer(explorer()) is None
    assert "not installed" in capsys.readouterr().out


def test_opening_takes_the_first_nodes_headline_or_the_state_given():
    box = widgets.explorer(explorer(), dataclasses.replace(START, world=8))
    assert "P = 8" in box.children[1].children[0].children[1].children[0].value
    with pytest.raises(ValueError, match="node='h100'"):
        widgets.explorer(explorer(), State("h100"))
