"""The picture of the training images that helped and harmed most."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from torch import Tensor

from . import plots
from .runs import Row

_SIDES = {"helpful": plots.GREEN, "harmful": plots.ORANGE}


def draw(path: Path, images: Mapping[str, Tensor], pairs: Sequence[tuple[Row, Row]]) -> None:
    """Draw a row for each query: its image, those that helped it most, and those that harmed it most.

    Args:
        path: the file to write.
        images: "queries" [Q, H, W], "helpful" and "harmful" [Q, K, H, W].
        pairs: for each query the rows of its helpful and of its harmful images, with their labels.
    """
    shown = images["helpful"].shape[1]
    half = [0.4, *[1.0] * shown]
    widths = [1.2, *half, *half]
    size = (0.8 * sum(widths), 1.0 * len(pairs) + 0.5)
    place = {"left": 0.01, "right": 0.99, "bottom": 0.1 / size[1], "top": 1.0 - 0.55 / size[1]}
    more = {"gridspec_kw": {"width_ratios": widths, "wspace": 0.1, "hspace": 0.25, **place}}
    with plots.panels(path, len(pairs), len(widths), size, **more) as axes:
        axes[0, 0].figure.set_layout_engine("none")
        for axis in axes.flat:
            axis.axis("off")
        for (side, colour), first in zip(_SIDES.items(), (2, 3 + shown), strict=True):
            look = {"fontsize": 10, "color": colour, "fontweight": "bold"}
            axes[0, first].annotate(f"most {side}", (0, 1.34), xycoords="axes fraction", **look)
            for line, pair, of_query in zip(axes, pairs, images[side], strict=False):
                row = pair[list(_SIDES).index(side)]
                for axis, image, label in zip(line[first:], of_query, row["labels"], strict=False):
                    wrong = label["label"] != label["is"]
                    text = f"{label['label']}, is {label['is']}" if wrong else str(label["label"])
                    _show(axis, image, text, plots.RED if wrong else plots.GREY)
        for line, pair, image in zip(axes, pairs, images["queries"], strict=False):
            query = pair[0]["query"]
            _show(line[0], image, f"{query['is']}, read as {query['read']}", plots.BLUE)


def _show(axis: Axes, image: Tensor, text: str, colour: str) -> None:
    """An image in a frame, dark on white, with a text above it."""
    axis.axis("on")
    axis.imshow(-image.numpy(), cmap="gray")
    axis.set_xticks([])
    axis.set_yticks([])
    for edge in axis.spines.values():
        edge.set_color(colour)
        edge.set_linewidth(1.6)
    axis.set_title(text, fontsize=8, color=colour, pad=2)
