"""What MkDocs does here beyond its settings: formulas become MathML as pages are built, and pages of the repository's root join the site."""

import html
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files, config):
    """Pages link to these as ../NAME, which is where a reader of the repository finds them."""
    for path in (
        ROOT / "ARCHITECTURE.md",
        ROOT / "SECURITY.md",
        *sorted(path for path in (ROOT / "deploy").rglob("*") if path.is_file()),
        *sorted((ROOT / "examples").rglob("*.py")),
    ):
        files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    if page.file.src_uri in ("ARCHITECTURE.md", "SECURITY.md"):
        return markdown.replace("](docs/", "](")
    return re.sub(r"\]\(((?:\.\./)*)\.\./(ARCHITECTURE\.md|SECURITY\.md|deploy/|examples/)", r"](\1\2", markdown)


def on_page_content(content, page, config, files):
    return FORMULA.sub(lambda m: convert(html.unescape(m[3].strip()), display="block" if m[2] == "[" else "inline"), content)
