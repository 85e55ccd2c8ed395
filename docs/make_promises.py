"""Writes docs/promises/*.md: a page for each promise of SECURITY.md, from its own row there and
from promises.toml. `python docs/make_promises.py`.
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs/promises"


def rows() -> list[tuple[str, list[str]]]:
    """(promise, names of its tests), in the order of SECURITY.md."""
    page = (ROOT / "SECURITY.md").read_text()
    table = page[page.index("## What the gate keeps") : page.index("## What to know")]
    lines = [
        line
        for line in table.splitlines()
        if line.startswith("| ") and not line.startswith("| promise")
    ]
    return [
        (
            line.split(" | ")[0].removeprefix("| "),
            re.findall(r"`(test_\w+)`", line.split(" | ", 1)[1]),
        )
        for line in lines
    ]


def _section(group: dict[str, str], lines: list[str]) -> str:
    """Gives a group's section of the index: for whom, what is assumed, and its promises."""
    return "\n\n".join(
        [
            f"## {group['title']}",
            f"**For whom.** {group['whom']}",
            f"**Assumed.** {group['assumes']}",
            "\n".join(lines),
        ]
    )


def _shortened(promise: str) -> str:
    """Gives the promise's first sentence, or its first two where the first has under six words."""
    sentences = promise.split(". ")
    return ". ".join(sentences[: 1 if len(sentences[0].split()) > 5 else 2])


def pages() -> dict[str, str]:
    """Name of a file -> its text. Raises ValueError that names a promise without words here, or
    words without a promise.
    """
    said = tomllib.loads((FOLDER / "promises.toml").read_text())
    groups, left, made = said["groups"], list(said["promise"]), {}
    listed: dict[str, list[str]] = {name: [] for name in groups}
    for promise, tests in rows():
        found = [
            words for words in left if re.match(rf"(\d+ )?{re.escape(words['starts'])}", promise)
        ]
        if len(found) != 1:
            raise ValueError(
                f"docs/promises/promises.toml has {len(found)} entries for "
                f"{promise[:60]!r}; it must have one"
            )
        (words,) = found
        left.remove(words)
        group = groups[words["group"]]
        title = words["slug"].replace("-", " ").capitalize()
        anchor = group["title"].lower().replace(" ", "-")
        made[f"{words['slug']}.md"] = "\n\n".join(
            [
                f"# {title}",
                f"> {promise}.",
                f"**For whom, and what is assumed:** see [{group['title']}](index.md#{anchor}).",
                f"**How it is kept.** {words['kept']}",
                f"**Not covered.** {words['limits']}",
                "**What goes red when it is broken:**\n\n"
                + "\n".join(f"- `{test}`" for test in tests),
                "[All promises](index.md), [glossary](../glossary.md)\n",
            ]
        )
        listed[words["group"]].append(f"- [{title}]({words['slug']}.md): {_shortened(promise)}")
    if left:
        raise ValueError(
            f"docs/promises/promises.toml speaks of {left[0]['starts']!r}, which "
            "SECURITY.md does not promise"
        )
    parts = [_section(groups[name], lines) for name, lines in listed.items()]
    about = (
        "What a gate promises. This list has the beginning of each promise. Its page has the "
        "whole promise, how it is kept, what is not covered, and which test goes red when it is "
        "broken. The [threat model](../../SECURITY.md) has all promises in one "
        "table, with who is trusted for what and what is out of scope."
    )
    made["index.md"] = "\n\n".join(["# The promises", about, *parts]) + "\n"
    return made


if __name__ == "__main__":
    for old in FOLDER.glob("*.md"):
        old.unlink()
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
