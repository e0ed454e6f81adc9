"""A notebook's own cells in this process: what they do is tested without the seconds that a kernel and its imports take."""

from __future__ import annotations

from typing import Any

import nbformat

from m3cp import notebook


def run(name: str, *cells: str, **given: Any) -> dict[str, Any]:
    """Run the imports and parameters of a notebook, then the cells of these ids, as papermill would.

    Args:
        name: of the notebook, such as "10_sweep".
        given: parameters to inject, also such as it does not have.

    Returns:
        The notebook's globals.
    """
    sources = {c.id: c.source for c in nbformat.read(str(notebook.FOLDER / f"{name}.ipynb"), as_version=4).cells}
    names = {"__name__": "__main__"}
    for cell in ("imports", "parameters"):
        exec(sources[cell], names)
    names.update(given)
    for cell in cells:
        exec(sources[cell], names)
    return names
