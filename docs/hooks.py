"""What MkDocs does here beyond its settings: formulas become MathML as pages are built, and pages
of the repository's root join the site.
"""

import html
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
ROOTS = ("ARCHITECTURE.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
"""On a narrow screen a wide one scrolls by itself: whoever has no mouse must come to it, by a link
in it or by itself.
"""
CODE = re.compile(r"(?<!</span>)<code>([^<]*)</code>")
"""In a sentence: that of a block follows a span."""
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]{0,20}")
PICTURE = re.compile(r"<p>(<img [^>]*>)</p>")
"""Alone in its paragraph: one in a sentence, or in a link, is as wide as there is room."""
PANELS = ("/verdict.png",)
"""Figures of so many panels that they do not even fit a desk's column."""


def on_files(files, config):
    """Pages link to these as ../NAME, which is where a reader of the repository finds them."""
    for path in (
        *(ROOT / name for name in ROOTS),
        *sorted(path for path in (ROOT / "deploy").rglob("*") if path.is_file()),
        *sorted((ROOT / "examples").rglob("*.py")),
    ):
        files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    up = "../" * page.file.src_uri.count("/")
    if page.file.src_uri != "glossary.md":
        markdown += f"\n\n---\n\n[What the words mean]({up}glossary.md)\n"
    if page.file.src_uri in ROOTS:
        return markdown.replace("](docs/", "](").replace(
            "](LICENSE)", "](https://www.apache.org/licenses/LICENSE-2.0)"
        )
    return re.sub(
        r"\]\(((?:\.\./)*)\.\./((?:ARCHITECTURE|SECURITY|CONTRIBUTING|CHANGELOG)\.md|deploy/|examples/)",
        r"](\1\2",
        markdown,
    )


def on_page_content(content, page, config, files):
    content = FORMULA.sub(lambda m: _math(html.unescape(m[3].strip()), apart=m[2] == "["), content)
    content = CODE.sub(lambda m: OPTION.sub(r'<span class="option">\g<0></span>', m[0]), content)
    content = PICTURE.sub(lambda m: _drawing(m[1], page.file.src_uri), content)
    return TABLE.sub(
        lambda m: m[0] if "<a " in m[0] else m[0].replace("<table", '<table tabindex="0"', 1),
        content,
    )


def _drawing(image, where):
    """A picture whose words can be read on a narrow screen too: of a whole page that one for a
    phone is shown, and any other keeps a least width and scrolls by itself."""
    said, source = (re.search(rf'{name}="([^"]*)"', image)[1] for name in ("alt", "src"))
    if source.endswith("-desktop.png"):
        narrow = source.replace("-desktop.png", "-phone.png")
        return (
            f'<p><picture><source media="(max-width: 44em)" srcset="{narrow}">{image}</picture></p>'
        )
    size = (
        "small"
        if where.startswith(("algorithms/", "notebooks/"))
        else "large"
        if source.endswith(PANELS)
        else "middle"
    )
    return (
        f'<div class="drawing {size}" role="group" aria-label="{said}" tabindex="0">{image}</div>'
    )


def _math(formula, *, apart):
    """One that stands apart is cut where it says \\quad, so that a narrow screen puts its parts
    below each other; a part that is still too wide scrolls by itself.
    """
    if not apart:
        return convert(formula, display="inline")
    parts = "".join(
        convert(part.strip(), display="block") for part in re.split(r"\\q?quad", formula)
    )
    return f'<div class="formula" role="group" aria-label="Formula" tabindex="0">{parts}</div>'
