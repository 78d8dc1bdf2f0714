"""Names beside the points of a plot, placed so that none hides another name, a point or a line."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

Point = tuple[float, float]
Boxes = NDArray[np.float64]
_POINT_RADIUS = 7.0  # of a marker and the air around it, in points
_LINE_RADIUS = 1.5
_LINE_SAMPLES = 40
_DISTANCES = (10.0, 20.0, 34.0)  # from the point to the label, in points; the nearest that fits is taken
_DIRECTIONS = (0.0, 180.0, 90.0, 270.0, 45.0, 135.0, 315.0, 225.0)  # degrees; the first are preferred


@dataclass(frozen=True)
class Label:
    """A name for the point at `point`, in the data's units."""

    name: str
    point: Point
    color: str


def place_labels(
    axes: Axes, labels: Sequence[Label], lines: Iterable[tuple[Point, Point]] = (), *, size: float
) -> None:
    """Write each label beside its point, clear of all points, of `lines` (pairs of ends) and of each other.

    The limits of `axes` must be final. Greedy: each takes the first place that hides least.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None and isinstance(figure.canvas, FigureCanvasAgg)
    figure.draw_without_rendering()  # settles the layout, and with it where data lies on the canvas
    renderer = figure.canvas.get_renderer()  # type: ignore[no-untyped-call]
    scale = figure.dpi / 72
    inside = np.array([axes.get_window_extent(renderer).extents])
    obstacles = [_around(axes, label.point, _POINT_RADIUS * scale) for label in labels]
    obstacles += [_around(axes, point, _LINE_RADIUS * scale) for point in _samples(lines)]
    taken = np.array([each.extents for each in obstacles])
    for label in labels:
        text = _write(axes, label, size)

        def cost(place: tuple[float, float], text: Annotation = text, taken: Boxes = taken) -> float:
            _move(text, *place)
            box = text.get_window_extent(renderer)
            outside = box.width * box.height - _overlap(box, inside)
            return outside + _overlap(box, taken)

        places = [(distance, degrees) for distance in _DISTANCES for degrees in _DIRECTIONS]
        _move(text, *min(places, key=cost))
        taken = np.vstack([taken, text.get_window_extent(renderer).extents])


def _write(axes: Axes, label: Label, size: float) -> Annotation:
    halo = withStroke(linewidth=3, foreground="white")
    text = axes.annotate(
        label.name,
        label.point,
        (0, 0),
        textcoords="offset points",
        color=label.color,
        fontsize=size,
        path_effects=[halo],
    )
    text.set_in_layout(False)
    return text


def _move(text: Annotation, distance: float, degrees: float) -> None:
    across, up = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    text.xyann = (distance * across, distance * up)
    text.set_horizontalalignment("left" if across > 0.1 else "right" if across < -0.1 else "center")
    text.set_verticalalignment("bottom" if up > 0.1 else "top" if up < -0.1 else "center")


def _samples(lines: Iterable[tuple[Point, Point]]) -> Iterator[Point]:
    for (x, y), (to_x, to_y) in lines:
        for step in range(_LINE_SAMPLES + 1):
            share = step / _LINE_SAMPLES
            yield x + share * (to_x - x), y + share * (to_y - y)


def _around(axes: Axes, point: Point, radius: float) -> Bbox:
    x, y = axes.transData.transform(point)
    return Bbox.from_extents(x - radius, y - radius, x + radius, y + radius)


def _overlap(box: Bbox, others: Boxes) -> float:
    """The area of `box` that lies under `others`, rows of left, bottom, right and top; counted again for each."""
    left, bottom, right, top = others.T
    widths = np.minimum(box.x1, right) - np.maximum(box.x0, left)
    heights = np.minimum(box.y1, top) - np.maximum(box.y0, bottom)
    return float((widths.clip(0) * heights.clip(0)).sum())
