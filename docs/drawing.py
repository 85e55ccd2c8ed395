"""One small picture for a page."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt


@contextmanager
def small_picture(path: Path) -> Iterator[plt.Axes]:
    """Axes to draw on; afterwards the file is there, with the same bytes for the same curves."""
    figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    yield axes
    axes.spines[["top", "right"]].set_visible(False)
    with matplotlib.rc_context({"svg.hashsalt": "silodp", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
