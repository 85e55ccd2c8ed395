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
    """One line: its colour is a number of the style sheet's, its dash "" (whole), "dash" or
    "dot".
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
    said: str,
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
    """A figure of lines from zero, or `low`, upwards, with a legend where there is more than one,
    under a sentence that says what is seen.
    """
    shown = [s for s in series if s.points]
    xs = [x for s in shown for x, _ in s.points] + ([least] if least is not None else [])
    highs = [
        y + (s.errors[i] if s.errors else 0) for s in shown for i, (_, y) in enumerate(s.points)
    ]
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
        left = 64 if percent else 54
        right = 12
        above = 10
        below = 40
        wide = width - left - right
        tall = height - above - below
        move = math.log if log else float

        def at(x: float, y: float) -> tuple[float, float]:
            span = move(high_x) - move(low_x) or 1.0
            return left + wide * (move(x) - move(low_x)) / span, above + tall * (
                1 - (max(min(y, high), low) - low) / (high - low)
            )

        parts = []
        for y in y_marks:
            _, v = at(low_x, y)
            parts.append(
                tag(
                    "line",
                    x1=left,
                    x2=width - right,
                    y1=f"{v:.1f}",
                    y2=f"{v:.1f}",
                    class_="grid" if y > max(low, 0) or y < 0 else "axis",
                )
            )
            parts.append(
                tag(
                    "text",
                    f"{100 * y:g} %" if percent else f"{y:g}",
                    x=left - 8,
                    y=f"{v + 4:.1f}",
                    text_anchor="end",
                )
            )
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
            aria_label=f"{title}. {said}",
            class_="PLACE",
        )

    marks = [
        (tag("line", x1=0, x2=26, y1=5, y2=5, class_=f"curve s{s.colour} {s.dash}".strip()), s.name)
        for s in shown
    ]
    return figure(
        title,
        said,
        _both(draw, SIZES[shape]),
        _legend(marks) if len(marks) > 1 else "",
        class_="square" if shape == "square" else None,
    )


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
    return " ".join(f"{'L' if i else 'M'}{x:.1f} {y:.1f}" for i, (x, y) in enumerate(points))


def spent_bar(
    name: str, charges: Sequence[tuple[int, str, float]], used: float, kinds: Sequence[str]
) -> Markup:
    """A budget as a bar: each charge is a piece of it, as long as its share and in the colour of
    its kind; the rest is empty.

    Where more than the budget was spent, pieces are shares of all that was spent.
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
            edge = "gap" if width * part > 3 else ""
            piece = {
                "x": f"{width * start:.2f}",
                "y": 1,
                "width": f"{width * min(part, 1 - start):.2f}",
                "height": height - 2,
            }
            parts.append(
                tag(
                    "rect",
                    what,
                    class_=f"f{kinds.index(kind) % 7 if kind in kinds else 0} {edge}".strip(),
                    **piece,
                )
            )
            start = min(1.0, start + part)
        said = (
            f"{name}: {used:.1%} of the budget is used, in {len(charges)} charges; "
            f"{max(0.0, 1 - used):.1%} is left"
        )
        return tag(
            "svg",
            *parts,
            viewBox=f"0 0 {width} {height}",
            role="img",
            aria_label=said,
            class_="PLACE",
        )

    return _both(draw, ((760, 22), (350, 22)))


def legend(names: Sequence[str]) -> Markup:
    """Which colour of a bar is what."""
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
    """About so many round numbers from low to high."""
    span = (high - low) or 1.0
    power = 10 ** math.floor(math.log10(span / count))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if span / (power * m) <= count)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]
