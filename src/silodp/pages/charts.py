"""Charts as inline SVG, drawn by hand: axes, lines with error bars, and bars of charges. Each comes
twice, for a wide and a narrow screen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from silodp.pages.markup import Markup, figure, tag

Points = Sequence[tuple[float, float]]
SIZES = {
    "": ((760, 300), (350, 250)),
    "flat": ((760, 180), (350, 200)),
    "square": ((440, 440), (340, 340)),
    "small": ((350, 220), (350, 220)),
}
"""(width, height) by a chart's shape, on a wide and on a narrow screen."""


@dataclass(frozen=True)
class Series:
    """One line of a chart. Its colour is a number of the style sheet. Its dash is "" (solid),
    "dash" or "dot".
    """

    name: str
    points: Points
    colour: int = 0
    dash: str = ""
    errors: Sequence[float] = ()
    area: bool = False
    dots: bool = False
    band: Points = ()
    """(low, high) at each point, drawn as an area about the line."""


def chart(
    title: str,
    description: str,
    series: Sequence[Series],
    *,
    across: str,
    up: str,
    log: bool = False,
    percent: bool = False,
    top: float | None = None,
    ticks: Sequence[float] | None = None,
    least: float | None = None,
    low: float = 0.0,
    shape: str = "",
) -> Markup:
    """Draw a figure of lines from zero, or from `low`, upwards. Return its markup.

    A sentence under the title describes the lines. Two or more lines get a legend.
    """
    shown = [s for s in series if s.points]
    xs = [x for s in shown for x, _ in s.points]
    if least is not None:
        xs.append(least)
    highs = [y for s in shown for y in _tops(s)]
    if not xs:
        return tag("p", "There is nothing to draw yet.", class_="soft")
    high = top or max(highs) * 1.05 or 1.0
    low_x = min(xs)
    high_x = max(xs)
    if ticks is not None:
        x_marks = list(ticks)
    else:
        x_marks = rounded(low_x, high_x, 6)
    y_marks = rounded(low, high, 5)

    def draw(width: int, height: int) -> Markup:
        left = 54 + 10 * percent
        right = 12
        above = 10
        below = 40
        wide = width - left - right
        tall = height - above - below
        move = float
        if log:
            move = math.log

        def at(x: float, y: float) -> tuple[float, float]:
            span = move(high_x) - move(low_x) or 1.0
            return left + wide * (move(x) - move(low_x)) / span, above + tall * (
                1 - (max(min(y, high), low) - low) / (high - low)
            )

        parts = []
        for y in y_marks:
            _, v = at(low_x, y)
            kind = "axis"
            if y > max(low, 0) or y < 0:
                kind = "grid"
            label = f"{y:g}"
            if percent:
                label = f"{100 * y:g} %"
            parts.append(
                tag(
                    "line",
                    x1=left,
                    x2=width - right,
                    y1=f"{v:.1f}",
                    y2=f"{v:.1f}",
                    class_=kind,
                )
            )
            parts.append(tag("text", label, x=left - 8, y=f"{v + 4:.1f}", text_anchor="end"))
        step = max(1, math.ceil(len(x_marks) * 46 / wide))
        for x in x_marks[::step]:
            h, _ = at(x, 0)
            parts.append(
                tag(
                    "line",
                    x1=f"{h:.1f}",
                    x2=f"{h:.1f}",
                    y1=above + tall,
                    y2=above + tall + 5,
                    class_="axis",
                )
            )
            parts.append(
                tag("text", f"{x:g}", x=f"{h:.1f}", y=above + tall + 19, text_anchor="middle")
            )
        parts.append(tag("text", across, x=left + wide / 2, y=height - 4, text_anchor="middle"))
        parts.append(
            tag(
                "text",
                up,
                x=14,
                y=above + tall / 2,
                text_anchor="middle",
                transform=f"rotate(-90 14 {above + tall / 2:g})",
            )
        )
        for s in shown:
            parts += _line(s, [at(x, y) for x, y in s.points], at, above + tall)
        return tag(
            "svg",
            *parts,
            viewBox=f"0 0 {width} {height}",
            role="img",
            aria_label=f"{title}. {description}",
            class_="PLACE",
        )

    marks = [
        (tag("line", x1=0, x2=26, y1=5, y2=5, class_=f"curve s{s.colour} {s.dash}".strip()), s.name)
        for s in shown
    ]
    below = ""
    if len(marks) > 1:
        below = _legend(marks)
    kind = None
    if shape == "square":
        kind = "square"
    return figure(title, description, _both(draw, SIZES[shape]), below, class_=kind)


def _tops(s: Series) -> list[float]:
    """Return the height of each point of the line, with its error bar."""
    if not s.errors:
        return [y for _, y in s.points]
    return [y + error for (_, y), error in zip(s.points, s.errors, strict=False)]


def _line(s: Series, path: Points, at: Callable, floor: float) -> list[Markup]:
    colour = f"s{s.colour}"
    parts = []
    words = _path(path)
    if s.band:
        edges = [
            at(x, ends[side > 0])
            for side in (1, -1)
            for (x, _), ends in list(zip(s.points, s.band, strict=True))[::side]
        ]
        parts.append(tag("path", d=f"{_path(edges)} Z", class_=f"area f{s.colour}"))
    if s.area:
        parts.append(
            tag(
                "path",
                d=f"{words} L{path[-1][0]:.1f} {floor:.1f} L{path[0][0]:.1f} {floor:.1f} Z",
                class_=f"area f{s.colour}",
            )
        )
    parts.append(tag("path", d=words, class_=f"curve {colour} {s.dash}".strip()))
    for (x, y), error in zip(s.points, s.errors, strict=False):
        (h, low), (_, high) = at(x, max(0.0, y - error)), at(x, y + error)
        for x1, y1, x2, y2 in (
            (h, low, h, high),
            (h - 4, low, h + 4, low),
            (h - 4, high, h + 4, high),
        ):
            parts.append(
                tag(
                    "line",
                    x1=f"{x1:.1f}",
                    y1=f"{y1:.1f}",
                    x2=f"{x2:.1f}",
                    y2=f"{y2:.1f}",
                    class_=f"whisker {colour}",
                )
            )
    if s.dots or len(path) == 1:
        parts += [
            tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=3.2, class_=f"f{s.colour}")
            for x, y in path
        ]
    return parts


def _path(points: Points) -> str:
    corners = [f"{x:.1f} {y:.1f}" for x, y in points]
    return "M" + " L".join(corners)


def whiskers(
    title: str, description: str, rows: Sequence[tuple[str, float, float]], *, ratios: bool = False
) -> Markup:
    """Draw one dot for each (name, value, half width of its band), under each other.

    With `ratios` the values are logarithms, and the axis is labelled with their ratios.
    """
    ends = [value + side * width for _, value, width in rows for side in (-1, 1)]
    low = min(0.0, *ends)
    high = max(0.0, *ends)
    if low == high:
        high = low + 1.0
    marks = rounded(low, high, 5)

    def draw(width: int, height: int) -> Markup:
        narrow = width < 500
        tall = 27
        left = 300
        if narrow:  # the name stands above its line
            tall = 42
            left = 8
        wide = width - left - 12
        bottom = tall * len(rows) + 6

        def at(x: float) -> float:
            return left + wide * (x - low) / (high - low)

        parts = []
        for x in marks:
            kind = "grid"
            if x == 0:
                kind = "axis"
            h = f"{at(x):.1f}"
            parts.append(tag("line", x1=h, x2=h, y1=0, y2=bottom, class_=kind))
            label = f"{math.exp(x):.2g}" if ratios else f"{x:g}"
            parts.append(tag("text", label, x=h, y=bottom + 16, text_anchor="middle"))
        for i, (name, value, band) in enumerate(rows):
            short = name
            if len(name) > 44:
                short = f"{name[:43]}…"
            if narrow:
                y = tall * i + 32
                parts.append(tag("text", short, x=left, y=y - 12, class_="name"))
            else:
                y = tall * i + 14
                parts.append(tag("text", short, x=left - 12, y=y + 4, text_anchor="end"))
            start = f"{at(value - band):.1f}"
            end = f"{at(value + band):.1f}"
            if band:
                parts.append(tag("line", x1=start, x2=end, y1=y, y2=y, class_="band s0"))
            parts.append(tag("circle", cx=f"{at(value):.1f}", cy=y, r=4, class_="f0"))
        return tag(
            "svg",
            *parts,
            viewBox=f"0 0 {width} {bottom + 24}",
            role="img",
            aria_label=f"{title}. {description}",
            class_="PLACE",
        )

    return figure(title, description, _both(draw, ((760, 0), (350, 0))))


def spent_bar(
    name: str, charges: Sequence[tuple[int, str, float]], used: float, kinds: Sequence[str]
) -> Markup:
    """Draw a budget as a bar. Each charge is a piece, as long as its share, in the colour of its
    kind.

    The unspent rest is empty. Where the charges exceed the budget, pieces are shares of the total
    spent.
    """
    whole = max(1.0, used)

    def draw(width: int, height: int) -> Markup:
        parts = [
            tag("rect", x=0.5, y=0.5, width=width - 1, height=height - 1, rx=3, class_="empty")
        ]
        pieces = charges or ((0, "", used),)
        start = 0.0
        for question, kind, share in pieces:
            what = tag("title", f"question {question + 1}, {kind}: {share:.2%} of the budget")
            part = share / whole
            colour = 0
            if kind in kinds:
                colour = kinds.index(kind) % 7
            css = f"f{colour}"
            if width * part > 3:
                css += " gap"
            piece = {
                "x": f"{width * start:.2f}",
                "y": 1,
                "width": f"{width * min(part, 1 - start):.2f}",
                "height": height - 2,
            }
            parts.append(tag("rect", what, class_=css, **piece))
            start = min(1.0, start + part)
        description = f"{name}: {used:.1%} of the budget is used, in {len(charges)} charges"
        return tag(
            "svg",
            *parts,
            viewBox=f"0 0 {width} {height}",
            role="img",
            aria_label=description,
            class_="PLACE",
        )

    return _both(draw, ((760, 22), (350, 22)))


def legend(names: Sequence[str]) -> Markup:
    """List the kinds of charges beside their colours."""
    return _legend(
        [
            (tag("rect", width=26, height=10, rx=2, class_=f"f{i % 7}"), name)
            for i, name in enumerate(names)
        ]
    )


def _legend(marks: Sequence[tuple[Markup, str]]) -> Markup:
    swatches = (
        (tag("svg", mark, viewBox="0 0 26 10", aria_hidden="true"), name) for mark, name in marks
    )
    return tag("ul", *(tag("li", *entry) for entry in swatches), class_="legend")


def _both(draw: Callable[[int, int], Markup], sizes: Sequence[tuple[int, int]]) -> Markup:
    return Markup(
        "".join(
            draw(*size).replace("PLACE", place)
            for size, place in zip(sizes, ("wide", "narrow"), strict=True)
        )
    )


def rounded(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers from low to high."""
    span = (high - low) or 1.0
    power = 10 ** math.floor(math.log10(span / count))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if span / (power * m) <= count)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]
