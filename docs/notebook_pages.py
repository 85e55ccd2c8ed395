"""Notebooks become pages as the site is built: each is run from its source in docs/notebooks/, in
an empty folder, so no output is ever stored in git.
"""

import functools
import re
import tempfile
from pathlib import Path

import jupytext
import nbformat
from mkdocs.structure.files import File
from nbclient import NotebookClient
from nbconvert import MarkdownExporter
from traitlets.config import Config

SOURCES = sorted((Path(__file__).parent / "notebooks").glob("*.py"))


@functools.cache
def executed(name: str, text: str) -> tuple[str, str, dict[str, bytes]]:
    """(page, notebook with its outputs, pictures) of a notebook's source; a cell that fails stops
    the build. Kept while `mkdocs serve` runs.
    """
    notebook = jupytext.reads(text, fmt="py:percent")
    with tempfile.TemporaryDirectory() as folder:
        own = Config(
            {"KernelManager": {"transport": "ipc", "ip": f"{folder}/kernel"}}
        )  # no port that others on this machine could knock at
        place = {"metadata": {"path": folder}}
        NotebookClient(
            notebook,
            timeout=600,
            startup_timeout=600,
            kernel_name="python3",
            resources=place,
            config=own,
        ).execute()
    page, resources = MarkdownExporter().from_notebook_node(
        notebook, {"unique_key": name, "output_files_dir": "."}
    )
    drawn = {
        f"{name}-{k}.png": picture for k, picture in enumerate(resources["outputs"].values(), 1)
    }
    for new, old in zip(drawn, resources["outputs"], strict=True):
        page = page.replace(f"![png]({old})", f"![The picture that the cell above draws]({new})")
    page = re.sub(
        r"<style scoped>.*?</style>\n", "", page, flags=re.DOTALL
    )  # pandas's own look, in place of the site's
    page = re.sub(r' border="1" class="dataframe"| style="text-align: right;"', "", page)
    return page, nbformat.writes(notebook) + "\n", drawn


def on_files(files, config):
    for source in SOURCES:
        name, made = source.stem, executed(source.stem, source.read_text())
        head, _, rest = made[0].partition("\n\n")
        page = f"{head}\n\n[This notebook, with its outputs]({name}.ipynb)\n\n{rest}"
        for path, content in {f"{name}.md": page, f"{name}.ipynb": made[1], **made[2]}.items():
            files.append(File.generated(config, f"notebooks/{path}", content=content))
    return files
