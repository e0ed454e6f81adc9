"""Sliders over the rows: a thin shell around pure drawing functions; every conclusion also stands in a static figure.

ipywidgets is imported when a widget is asked for. Without it a notebook says so and goes on.
"""

from __future__ import annotations

import io
from typing import Any

from m3cp import crossover, plots
from m3cp.shapes import tokens_text


@plots.styled
def point_figure(comparison: crossover.Comparison, context_tokens: int, batch: int):
    """Both arms over context at one batch, with one context marked: what the sliders show.

    Raises:
        ValueError: a batch that was not measured.
    """
    rows = comparison.frame[comparison.frame["batch"] == batch]
    if rows.empty:
        raise ValueError(
            f"batch={batch}: measured were {', '.join(str(b) for b in sorted(set(comparison.frame['batch'])))}"
        )
    drawn = plots.curves(rows, comparison.models)
    for axis in drawn.axes:
        axis.axvline(context_tokens, color="#000000", linewidth=0.8, alpha=0.5, zorder=0)
    drawn.set_size_inches(7.0, 4.2)
    return drawn


def point_sentence(comparison: crossover.Comparison, context_tokens: int, batch: int) -> str:
    """The verdict at a measured point in words, or that it was not measured."""
    pairs = comparison.pairs
    found = pairs[(pairs["context_tokens"] == context_tokens) & (pairs["batch"] == batch)]
    if found.empty:
        return f"{tokens_text(context_tokens)} tokens, batch {batch}: not measured here."
    return crossover.sentence(found.iloc[0])


def sliders(comparison: crossover.Comparison) -> Any:
    """Sliders for context and batch over the measured points of a comparison; None when ipywidgets is missing.

    The picture is a fixed-size image that is replaced in place, so that the page does not jump; an error in a
    callback is shown in the sentence's place.
    """
    try:
        import ipywidgets
    except ImportError:
        print("ipywidgets is not installed: the figures above say everything; install it to move through the points.")
        return None
    contexts = sorted({int(c) for c in comparison.pairs["context_tokens"]})
    batches = sorted({int(b) for b in comparison.pairs["batch"]})
    context = ipywidgets.SelectionSlider(
        options=[(tokens_text(c), c) for c in contexts], value=contexts[len(contexts) // 2], description="context"
    )
    batch = ipywidgets.SelectionSlider(options=batches, value=batches[len(batches) // 2], description="batch")
    picture = ipywidgets.Image(format="png", width=770, height=462)
    words = ipywidgets.HTML()

    def redraw(change: Any = None) -> None:
        try:
            buffer = io.BytesIO()
            point_figure(comparison, context.value, batch.value).savefig(buffer, format="png", dpi=110)
            picture.value = buffer.getvalue()
            words.value = f"<p>{point_sentence(comparison, context.value, batch.value)}</p>"
        except Exception as error:  # an exception in a callback would vanish
            words.value = f"<p><b>{type(error).__name__}</b>: {error}</p>"

    context.observe(redraw, names="value")
    batch.observe(redraw, names="value")
    redraw()
    return ipywidgets.VBox([ipywidgets.HBox([context, batch]), words, picture])
