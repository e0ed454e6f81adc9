"""The explorer's controls: a thin shell of widgets around `explore` (numbers, words) and `dashboard` (the picture).

ipywidgets is imported when the explorer is asked for. Without it a notebook says so and goes on: everything that it
concludes also stands in a static figure.
"""

from __future__ import annotations

import asyncio
import dataclasses
import html
from pathlib import Path
from typing import Any

from m3cp import dashboard, frames
from m3cp.explore import BANDWIDTH, BATCHES, CONTEXTS, EXCHANGE_US, Explorer, State
from m3cp.shapes import tokens_text

STATE_FILE = frames.ROOT / "data" / "runs" / "state.yaml"
SETTLE_S = 0.02  # what moves within this time of the first move is drawn once
# The answer stands in a box of fixed size, so that longer words move nothing; wide windows show it beside the picture.
STYLE = f"""<style>
.m3cp-left {{ flex: 1 1 440px; min-width: 0; overflow: hidden; }}
.m3cp-words {{ position: relative; flex: 1 1 330px; min-height: 330px; overflow: hidden; }}
.m3cp-words .widget-html {{ position: absolute; inset: 0; margin: 0; overflow: auto; }}
.m3cp-words .widget-html-content {{ line-height: 1.3; font-size: 13px; white-space: normal; }}
.m3cp-words p {{ margin: 0 0 6px; }} .m3cp-words ul {{ margin: 0 0 8px; padding-left: 18px; }}
.m3cp-words li {{ margin: 0; font-size: 12px; line-height: 1.3; }}
.m3cp-words code {{ font-size: 11px; white-space: normal; overflow-wrap: anywhere; }}
.m3cp-words .m3cp-verdict {{ font-size: 14px; }}
.m3cp-picture {{ flex: 1 1 900px; min-width: 0; align-self: flex-start; }}
.m3cp-picture img, img.m3cp-picture {{ width: 100%; max-width: {dashboard.WIDTH}px; height: auto; aspect-ratio: {dashboard.WIDTH} / {dashboard.HEIGHT}; }}
</style>"""


def explorer(found: Explorer, state: State | None = None, save_to: Path = STATE_FILE) -> Any:
    """The controls, the answer in words and the picture as one widget; None when ipywidgets is missing.

    Args:
        found: the nodes to move through.
        state: to open with; None opens with the first node's headline.
        save_to: where the button writes the state as YAML.

    Raises:
        ValueError: a state whose node is not here.
    """
    try:
        import ipywidgets  # noqa: F401
    except ImportError:
        print("ipywidgets is not installed: the figures say everything; install it to move through the points.")
        return None
    return Controls(found, found.start(state), save_to).box


class Controls:
    """Widgets that hold a state; every change of one is drawn, changes in quick succession once.

    Args:
        found: the nodes.
        state: to open with.
        save_to: where the button writes YAML.
    """

    def __init__(self, found: Explorer, state: State, save_to: Path = STATE_FILE):
        import ipywidgets as w

        self.found, self.state, self.save_to = found, state, save_to
        self.dashboard = dashboard.Dashboard()
        self.note, self._timer, self._setting = "", None, False
        def how(pixels: int, label: int = 70) -> dict[str, Any]:
            return {"layout": w.Layout(width="auto", min_width="0", flex=f"1 1 {pixels}px"), "style": {"description_width": f"{label}px"}}

        names = {"node": "node", "way": "exchange", "queries": "queries", "dtype": "dtype", "world": "ranks, P", "mix": "mix"}
        self.choosers = {name: w.Dropdown(description=words, **how(300 if name in ("node", "way") else 150)) for name, words in names.items()}
        self.sliders = {
            "context_tokens": w.SelectionSlider(options=[(tokens_text(c), c) for c in CONTEXTS], description="context", **how(200)),
            "batch": w.SelectionSlider(options=list(BATCHES), description="batch", **how(200)),
            "exchange_us": w.FloatSlider(
                min=EXCHANGE_US[0], max=EXCHANGE_US[1], step=0.5, description="if CP took +µs", readout_format="+.1f", **how(200, 104)
            ),
            "bandwidth": w.FloatSlider(
                min=BANDWIDTH[0], max=BANDWIDTH[1], step=0.05, value=1.0, description="if bandwidth ×", readout_format=".2f", **how(200, 104)
            ),
        }
        self.reset = w.Button(description="as measured", tooltip="what-if knobs back to neutral", layout=w.Layout(width="110px"))
        self.words = w.HTML()
        self.picture = w.Image(format="png", width=dashboard.WIDTH, height=dashboard.HEIGHT)
        self.yaml = w.Textarea(description="state", rows=11, disabled=True, layout=w.Layout(width="420px"))
        self.save = w.Button(description="save as YAML", layout=w.Layout(width="130px"))
        self.saved = w.HTML()
        for control in (*self.choosers.values(), *self.sliders.values()):
            control.observe(self._changed, names="value")
        self.reset.on_click(lambda _: self.move(exchange_us=0.0, bandwidth=1.0))
        self.save.on_click(lambda _: self._save())
        rows = (("node",), ("way", "queries"), ("dtype", "world", "mix"), ("context_tokens", "batch"), ("exchange_us", "bandwidth"))
        named = {**self.choosers, **self.sliders}
        controls = w.VBox([*(w.HBox([named[name] for name in row]) for row in rows), self.reset], layout=w.Layout(flex="0 0 auto", overflow="hidden"))
        words = w.VBox([self.words])
        left = w.VBox([controls, words])
        for widget, name in ((left, "m3cp-left"), (words, "m3cp-words"), (self.picture, "m3cp-picture")):
            widget.add_class(name)
        seen = w.HBox([left, self.picture], layout=w.Layout(flex_flow="row wrap", overflow="visible"))
        export = w.HBox([self.yaml, w.VBox([self.save, self.saved])])
        self.box = w.VBox([w.HTML(STYLE), seen, export])
        self._show_state()
        self.draw()

    def move(self, **changes: Any) -> None:
        """Set some fields of the state, as the controls do."""
        self._take(dataclasses.replace(self.state, **changes))

    def _changed(self, change: Any) -> None:
        if self._setting:
            return
        name = next(n for n, c in (*self.choosers.items(), *self.sliders.items()) if c is change["owner"])
        try:
            if name == "node":
                asked = dataclasses.replace(self.state, node=change["new"])
                self._take(self.found.nodes[change["new"]].nearest(self.state), asked)
            else:
                value = change["new"]  # a browser may send 1.0000000000000002
                self._take(dataclasses.replace(self.state, **{name: round(value, 3) if isinstance(value, float) else value}))
        except Exception as error:  # an exception in a callback would vanish
            self._say(error)

    def _take(self, state: State, asked: State | None = None) -> None:
        moved = [f"{f.name} {getattr(state, f.name)}" for f in dataclasses.fields(State) if asked and getattr(asked, f.name) != getattr(state, f.name)]
        self.note = f"Moved to what was measured on this node: {', '.join(moved)}." if moved else ""
        self.state = state
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # no kernel's loop: a plain interpreter or a test
            self.draw()
            return
        if self._timer is None:
            self._timer = loop.call_later(SETTLE_S, self.draw)

    def draw(self) -> None:
        """Draw the state as it is now; an error is shown where the answer would stand."""
        self._timer = None
        try:
            self.found.nodes[self.state.node].prepare(self.state)
            view = self.found.view(self.state)
            self.dashboard.show(view)
            self.picture.value = self.dashboard.png()
            note = f"<p>{html.escape(self.note)}</p>" if self.note else ""
            self.words.value = note + view.words
            self._show_state()
        except Exception as error:  # an exception in a callback would vanish
            self._say(error)

    def _say(self, error: Exception) -> None:
        self.words.value = f"<p><b>{type(error).__name__}</b>: {html.escape(str(error))}</p>"

    def _show_state(self) -> None:
        """Make the controls say what the state is; labels tell what this node has not measured."""
        self._setting = True
        try:
            for name, options in self.found.options(self.state).items():
                chooser = self.choosers[name]
                if list(chooser.options) != options:
                    chooser.options = options
                chooser.value = getattr(self.state, name)
            for name, slider in self.sliders.items():
                slider.value = getattr(self.state, name)
            self.yaml.value = self.state.to_yaml()
        finally:
            self._setting = False

    def _save(self) -> None:
        try:
            self.save_to.parent.mkdir(parents=True, exist_ok=True)
            self.save_to.write_text(self.state.to_yaml())
            self.saved.value = f"saved: <code>{html.escape(str(self.save_to))}</code><br>papermill NOTEBOOK OUT -f that file: 10_sweep measures this point here, 20_crossover opens here"
        except OSError as error:
            self.saved.value = f"<b>not saved</b>: {html.escape(str(error))}"
