"""Table 1 of a paper: columns by group, as Markdown, CSV and HTML, and box plots of the numbers.

All of it is made from the figures of `silodp table1 --json`.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from silodp.core.figures import rounded_up
from silodp.core.quality import Z
from silodp.pages.markup import Markup, document, figure, section, table, tag

NOISY = "too noisy"
WIDTH = 760
LEFT = 150
RIGHT = 16
ROW = 30
"""Pixels of a box plot: the whole, the margins beside it, and one row."""


def heading(answer: Mapping[str, Any]) -> list[str]:
    """Return the headings: column, level, missing, and one for each group."""
    names = [group["name"] for group in answer["groups"]]
    if answer["by"]:
        names = [names[0], *(f"{answer['by']}: {name}" for name in names[1:])]
    return ["", "level", "Missing", *names]


def lines(answer: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of the table as text, in the layout of R's and Python's tableone."""
    sizes = [_size(group) for group in answer["groups"]]
    rows = [["n", "", "", *sizes]]
    for column in answer["columns"]:
        name = column["column"]
        missing = _count(column["missing"])
        groups = column["groups"]
        if column["kind"] == "number":
            rows.append([f"{name}, mean (SD)", "", missing, *map(_mean, groups)])
            rows.append([f"{name}, median [IQR]", "", "", *map(_median, groups)])
            continue
        levels = list(enumerate(column["labels"]))
        if column["kind"] == "boolean":
            levels = levels[1:]
        title = f"{name}, n (%)"
        for k, label in levels:
            rows.append([title, label, missing, *(_level(group["levels"][k]) for group in groups)])
            title = ""
            missing = ""
    return rows


def _size(group: Mapping[str, Any]) -> str:
    """Return the number of records of a group."""
    if group["records"] < Z * group["records_error"]:
        return _below(group["records"], group["records_error"])
    return f"{group['records']:,.0f}"


def _below(count: float, error: float) -> str:
    """Return the bound on a count that noise hides."""
    return f"<{max(math.ceil(count + Z * error), 1):,}"


def _count(level: Mapping[str, float]) -> str:
    """Return a count, or a bound on it."""
    if level["count"] < Z * level["count_error"]:
        return _below(level["count"], level["count_error"])
    return f"{level['count']:,.0f}"


def _level(level: Mapping[str, float]) -> str:
    """Return a count with its share in per cent, or a bound on the count."""
    count = _count(level)
    if count.startswith("<"):
        return count
    return f"{count} ({100 * level['share']:.1f})"


def _mean(group: Mapping[str, Any]) -> str:
    """Return mean and deviation, with as many decimals as the noise leaves."""
    mean = group["mean"]
    if _hidden(group) or Z * mean["noise"] > mean["deviation"]:
        return NOISY
    digits = _digits(math.hypot(mean["noise"], mean["sampling"]))
    return f"{mean['value']:.{digits}f} ({mean['deviation']:.{digits}f})"


def _median(group: Mapping[str, Any]) -> str:
    """Return the median with the quartiles in brackets."""
    found = {q["level"]: q for q in group["quantiles"]}
    wide = found[0.5]["high"] - found[0.5]["low"]
    low, high = group["range"]
    if _hidden(group) or wide > (high - low) / 2:
        return NOISY
    digits = _digits(wide / 4)
    first, middle, last = (f"{found[level]['value']:.{digits}f}" for level in (0.25, 0.5, 0.75))
    return f"{middle} [{first}, {last}]"


def _hidden(group: Mapping[str, Any]) -> bool:
    """Return whether noise hides how many records a group has."""
    return group["records"] < Z * group["records_error"]


def _digits(error: float) -> int:
    """Return the decimals down to the first digit of an error."""
    if not error > 0:
        return 4
    return min(max(-math.floor(math.log10(error)), 0), 4)


def footnotes(answer: Mapping[str, Any]) -> list[str]:
    """Return the sentences below the table: price, uncertainty, and how to read marks."""
    notes = [_price(answer)]
    error = f"{answer['count_error']:.2g}"
    if answer["by"]:
        notes.append(
            f"By the privacy noise, a count has a standard error of {error} in a group, and of "
            f"{answer['overall_error']:.2g} in {answer['groups'][0]['name']}."
        )
    else:
        notes.append(f"By the privacy noise, a count has a standard error of {error}.")
    notes.append(
        "The noise is included in the intervals of --json and --csv. Means, SD and quantiles are "
        "computed from bins of the schema's public ranges. Shares leave missing values out."
    )
    text = [cell for row in lines(answer) for cell in row]
    if any(cell.startswith("<") for cell in text):
        notes.append("<k: the noise hides the count, which is below k (97.5 % confidence).")
    if NOISY in text:
        notes.append(f"{NOISY}: ask with a larger epsilon, fewer columns or fewer groups.")
    if answer["by"]:
        notes.append(
            f"Records in which {answer['by']} is missing are in {answer['groups'][0]['name']} only."
        )
    return notes


def _price(answer: Mapping[str, Any]) -> str:
    """Return the sentence about the price."""
    silos = answer["silos"]
    spent = [silo.get("spent_epsilon", silo["epsilon"]) for silo in silos]
    delta = rounded_up(max(silo["delta"] for silo in silos))
    low = rounded_up(min(spent))
    high = rounded_up(max(spent))
    each = low if low == high else f"{low} to {high}"
    return (
        f"{answer['records']:,} records of {len(silos)} silos, by one private question. It cost "
        f"each silo epsilon {each} at delta {delta} at most."
    )


# --- forms ---------------------------------------------------------------------------------------


def markdown(answer: Mapping[str, Any]) -> str:
    """Return the table as Markdown, with its footnotes."""
    head = heading(answer)
    rows = [head, ["---", "---", *["---:"] * (len(head) - 2)], *lines(answer)]
    text = "".join(f"| {' | '.join(map(_escaped, row))} |\n" for row in rows)
    return text + "\n" + "".join(f"{_escaped(note)}\n" for note in footnotes(answer))


def _escaped(cell: str) -> str:
    """Return the text of a cell without a meaning in Markdown."""
    for mark in ("\\", "|", "<", "[", "]", "*", "_", "`"):
        cell = cell.replace(mark, f"\\{mark}")
    return cell


FIELDS = ("column", "group", "figure", "level", "value", "low", "high", "noise")


def as_csv(answer: Mapping[str, Any]) -> str:
    """Return every figure on a row of its own, unrounded, with its 95 per cent interval.

    `noise` is the standard error by the privacy noise. Quantiles have an interval alone.
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(FIELDS)
    names = [group["name"] for group in answer["groups"]]
    for group in answer["groups"]:
        count = group["records"]
        half = Z * group["records_error"]
        ends = (count - half, count + half)
        writer.writerow(_plain("", group["name"], "n", "", count, *ends, group["records_error"]))
    for column in answer["columns"]:
        title = column["column"]
        writer.writerows(_shares(title, names[0], "missing", "", column["missing"]))
        for name, group in zip(names, column["groups"], strict=True):
            for label, level in zip(column["labels"], group.get("levels", ()), strict=True):
                writer.writerows(_shares(title, name, "level", label, level))
            if column["kind"] == "number":
                writer.writerows(_numbers(title, name, group))
    return file.getvalue()


def _numbers(title: str, name: str, group: Mapping[str, Any]) -> list[list[Any]]:
    """Return the rows of a number in one group."""
    mean = group["mean"]
    ends = (mean["low"], mean["high"])
    rows = [
        _plain(title, name, "mean", "", mean["value"], *ends, mean["noise"]),
        _plain(title, name, "SD", "", mean["deviation"], "", "", ""),
    ]
    for q in group["quantiles"]:
        level = f"{q['level']:g}"
        rows.append(_plain(title, name, "quantile", level, q["value"], q["low"], q["high"], ""))
    return rows


def _shares(
    title: str, name: str, figure: str, label: str, level: Mapping[str, float]
) -> list[list[Any]]:
    """Return the rows of a count and of its share."""
    count = level["count"]
    half = Z * level["count_error"]
    ends = (count - half, count + half)
    return [
        _plain(title, name, f"{figure} count", label, count, *ends, level["count_error"]),
        _plain(
            title, name, f"{figure} share", label, level["share"], level["low"], level["high"], ""
        ),
    ]


def _plain(title: str, name: str, figure: str, level: str, *numbers: float | str) -> list[Any]:
    """Return one row of the CSV file. A text that a spreadsheet would run gets a quote mark."""
    words = [f"'{word}" if word[:1] in "=+-@" and word else word for word in (title, name)]
    label = f"'{level}" if level[:1] in "=+-@" and level else level
    shown = [f"{number:.6g}" if isinstance(number, float) else number for number in numbers]
    return [words[0], words[1], figure, label, *shown]


def page_of(answer: Mapping[str, Any]) -> str:
    """Return the whole page as text: the table, box plots and the price."""
    head = heading(answer)
    by = f" by {answer['by']}" if answer["by"] else ""
    over = tag("p", "silodp · Table 1 by one private release", class_="over")
    title = tag("header", over, tag("h1", f"{answer['records']:,} records{by}"))
    numbers = tuple(range(2, len(head)))
    first = table(f"Table 1{by}", head, lines(answer), numbers=numbers)
    notes = tag("ul", *(tag("li", note) for note in footnotes(answer)), class_="soft")
    boxes = box_plots(answer)
    parts = [title, first, notes]
    if boxes:
        parts.append(section("boxes", "Box plots", *boxes))
    return document("Table 1: report", tag("main", *parts, id="main"), policy=True, kind="report")


def box_plots(answer: Mapping[str, Any]) -> list[Markup]:
    """Return a figure with a box for each group, for every number.

    A box reaches from the first to the third quartile, with a line at the median, and its whiskers
    to 5 and 95 per cent. The thin bar below is the median's 95 per cent interval.
    """
    found = []
    for column in answer["columns"]:
        if column["kind"] != "number":
            continue
        groups = zip(answer["groups"], column["groups"], strict=True)
        shown = [(own["name"], group) for own, group in groups if _median(group) != NOISY]
        if shown:
            found.append(_boxes(column["column"], shown))
    return found


def _boxes(title: str, groups: Sequence[tuple[str, Mapping[str, Any]]]) -> Markup:
    """Draw the boxes of one number, one group below the other."""
    low, high = groups[0][1]["range"]
    wide = WIDTH - LEFT - RIGHT
    height = ROW * len(groups) + 30

    def at(value: float) -> str:
        """Return the place of a value across."""
        return f"{LEFT + wide * (value - low) / (high - low):.1f}"

    parts = []
    for k, (name, group) in enumerate(groups):
        levels = {q["level"]: q for q in group["quantiles"]}
        middle = ROW * k + ROW / 2
        first, centre, last = (levels[p]["value"] for p in (0.25, 0.5, 0.75))
        ends = levels[0.05]["value"], levels[0.95]["value"]
        parts += [
            tag("text", name, x=LEFT - 10, y=middle + 4, text_anchor="end"),
            _line(at(ends[0]), at(ends[1]), middle, "axis"),
            tag(
                "rect",
                tag("title", f"{name}: median {centre:.4g}, quartiles {first:.4g} and {last:.4g}"),
                x=at(first),
                y=middle - 8,
                width=f"{max(float(at(last)) - float(at(first)), 1):.1f}",
                height=16,
                class_="f0",
            ),
            tag("line", x1=at(centre), x2=at(centre), y1=middle - 8, y2=middle + 8, class_="axis"),
            _line(at(levels[0.5]["low"]), at(levels[0.5]["high"]), middle + 12, "whisker s1"),
        ]
    floor = ROW * len(groups) + 4
    parts.append(_line(str(LEFT), str(LEFT + wide), floor, "axis"))
    for value, anchor in ((low, "start"), ((low + high) / 2, "middle"), (high, "end")):
        parts.append(tag("text", f"{value:g}", x=at(value), y=floor + 18, text_anchor=anchor))
    words = (
        "Box: quartiles and median. Whiskers: 5 and 95 %. Thin bar: 95 % interval of the median."
    )
    drawn = tag(
        "svg", *parts, viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=f"{title}. {words}"
    )
    return figure(title, words, drawn)


def _line(x1: str, x2: str, y: float, kind: str) -> Markup:
    """Draw a horizontal line."""
    return tag("line", x1=x1, x2=x2, y1=y, y2=y, class_=kind)
