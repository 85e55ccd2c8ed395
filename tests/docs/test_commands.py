"""Check the commands of the pages: the README, the quickstart and two more pages are run from an
empty folder, and every option shown anywhere exists.
"""

import os
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
import typer

import silodp as package
from silodp.cli import app as cli
from silodp.cli import console
from silodp.server.advice import candidates, chooser, trusts
from silodp.simulation import frames

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *(ROOT / "docs").rglob("*.md"),
        *ROOT.glob("*.md"),
        *(p for p in (ROOT / "deploy").rglob("*") if p.is_file()),
        *(ROOT / "examples").glob("*.py"),
    ]
)
BLOCK = re.compile(
    r'^```(console|python title="(?P<file>[\w.]+)")\n(?P<text>.*?)^```$', re.MULTILINE | re.DOTALL
)


def told(text):
    """(command, lines that it should print), for each `$ ` line of a console block."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, *lines = part.rstrip("\n").split("\n")
        yield command, lines


def says(printed, wanted):
    """Whether the lines are those wanted, however wide the screen; `…` is any text in a line, and
    alone any number of lines.
    """
    words = [
        r"(?s:.*?)"
        if line == "…"
        else r"\s+".join(r"[^\n]*?".join(map(re.escape, w.split("…"))) for w in line.split())
        for line in wanted
    ]
    return re.fullmatch(r"\s*".join(["", *words, ""]), printed) is not None


@pytest.fixture(autouse=True)
def brief(request, monkeypatch):
    """The advisor tries less on fewer made-up records, and says the same sentences: what it finds
    by all of it is tests/server/advice's. Not with SILODP_LONG=1, and not for the quickstart: its
    readers get the choice that the page shows.
    """
    if "SILODP_LONG" not in os.environ and "quickstart" not in request.node.name:
        less = tuple(
            replace(effort, worlds=effort.worlds[:2], pool=300, tested=300, trials=1)
            for effort in candidates.EFFORTS
        )
        monkeypatch.setattr(chooser, "EFFORTS", less)
        monkeypatch.setattr(trusts, "EFFORTS", less)


@pytest.fixture
def type_in(monkeypatch, capfd, tmp_path_factory):
    """Types a command into an empty folder: (exit code, what it printed). silodp itself runs in
    this process, to start once.
    """
    folder = tmp_path_factory.mktemp("q")  # short, for the sockets in it
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SILODP_STATE", str(folder / "state"))
    monkeypatch.delenv(
        "COLUMNS", raising=False
    )  # sentences as in a pipe, whole; tables as on a wide screen
    monkeypatch.setattr(console.out, "width", 100)

    def run(command):
        words = shlex.split(command)
        if words[0] == "cd":
            monkeypatch.chdir(words[1])
            return 0, ""
        if words[0] != "silodp":
            done = subprocess.run(
                [sys.executable if words[0] == "python" else words[0], *words[1:]],
                capture_output=True,
                text=True,
                check=False,
            )
            return done.returncode, done.stdout + done.stderr
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code or 0, capfd.readouterr().out

    yield run
    for made in folder.rglob("federation.json"):
        run(f"silodp federation down --folder {made.parent}")


def loose(text):
    """Return the text without its numbers, hashes and widths of tables. Another processor rounds
    otherwise.
    """
    text = re.sub(r"([━─])\1+", r"\1", re.sub(r"\b[0-9a-f]{32,}\b", "#", text))
    return re.sub(r"-?\d+(\.\d+)*(e-\d+)?", "#", text)


PRICE = r"(?:[Ee]psilon|delta|spent|together) [\d.]*\d(?:e-\d+)?"


def priced(text):
    """Return the text without its numbers, except for prices, which are the same everywhere."""
    return "".join(
        part if re.fullmatch(PRICE, part) else loose(part) for part in re.split(f"({PRICE})", text)
    )


@pytest.mark.parametrize(
    ("name", "seen", "least"),
    [
        pytest.param(
            "quickstart.md", priced, 17, marks=pytest.mark.xdist_group("federation-flower")
        ),
        pytest.param("choosing.md", loose, 4),
        pytest.param("second-model.md", str, 8, marks=pytest.mark.xdist_group("federation-direct")),
    ],
)
@pytest.mark.filterwarnings(
    "ignore:subprocess .* is still running:ResourceWarning"
)  # gates outlive the command that starts them
def test_a_page_does_what_it_says(type_in, name, seen, least):
    page, count = (ROOT / "docs" / name).read_text(), 0
    for block in BLOCK.finditer(page):
        if block["file"]:
            Path(block["file"]).write_text(block["text"])
            continue
        for command, lines in told(block["text"]):
            code, printed = type_in(command)
            assert code == 0, f"{command}\n{printed}"
            assert says(seen(printed), map(seen, lines)), (
                f"{command}\nprinted\n{printed}\nbut the page says\n" + "\n".join(lines)
            )
            count += 1
    assert count >= least


def test_the_readme_shows_what_the_demo_prints_on_one_screen(type_in, monkeypatch):
    demo = SimpleNamespace(**runpy.run_path(str(ROOT / "examples/demo.py")))
    printed = []
    seeded = {"train": " --seed 1", "evaluate": " --seed 1"}

    def run(command):
        code, out = type_in(f"silodp {command}{seeded.get(command.split()[0], '')}")
        assert code == 0, out
        return out

    names = demo.main.__globals__
    monkeypatch.setitem(names, "silodp", run)
    monkeypatch.setitem(names, "print", lambda text, flush=False: printed.append(f"{text}\n"))
    demo.main(demo.free_folder())
    output = "".join(printed)
    (block,) = BLOCK.finditer((ROOT / "README.md").read_text())
    command, _, shown = block["text"].partition("\n")
    assert command == "$ make demo"
    assert "examples/demo.py" in (ROOT / "Makefile").read_text()
    assert says(loose(output), map(loose, shown.splitlines())), output
    assert len(output.splitlines()) <= 45
    assert Path("demo/runs/train/report.html").is_file()
    assert demo.free_folder() == Path("demo-2")


def test_the_python_of_the_home_page_prints_what_it_shows(type_in, monkeypatch, capfd):
    page = (ROOT / "docs/index.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (shown,) = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 10
    (made,) = re.findall(r"`(silodp init .*?)`", page)
    assert type_in(made)[0] == 0
    monkeypatch.setattr(package, "train", partial(frames.train, seed=1))
    monkeypatch.setattr(frames.Trained, "evaluate", partialmethod(frames.Trained.evaluate, seed=1))
    exec(compile(code, "docs/index.md", "exec"), {})
    printed = capfd.readouterr().out
    assert says(loose(printed), map(loose, shown.splitlines())), printed


def test_the_comparison_of_output_can_fail():
    assert says("a  7\n\nb\n", ["a …", "b"])
    assert says("x\ny\nz\n", ["…", "z"])
    assert not says("a 7\nb\n", ["a …"])
    assert not says("a 7\nb\n", ["a 8", "b"])
    assert not says("x\n", ["…", "z"])
    assert says("a long line\n", ["a long", "line"])
    assert not says(loose("a 7 %\n"), [loose("b 7 %")])
    assert says(loose("ends on 2027-11-28.\n"), [loose("ends on ….")])
    assert says(priced("a 7, epsilon 3 of 8\n"), [priced("a 6, epsilon 3 of 9")])
    assert not says(priced("a 7, epsilon 3.1\n"), [priced("a 7, epsilon 3.2")])


def commands(text):
    """Every `silodp ...` in code: fenced lines and inline spans, each up to a comment, a pipe or
    the end of the span.
    """
    blocks = (
        text
        if not text.count("```")
        else "\n".join(re.findall(r"```[^\n]*\n(.*?)```", text, re.DOTALL))
    )
    fenced = re.findall(
        r"^ *(?:\$ )?(silodp [^\n#|]*)", re.sub(r"\\\n\s*", "", blocks), re.MULTILINE
    )
    inline = re.findall(r"`(?:\.venv/bin/)?(silodp [^`\n]*)`", text)
    return [c.strip() for c in [*fenced, *inline]]


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_command_and_option_that_a_page_shows_exists(path):
    root = typer.main.get_command(cli.app)
    for command in commands(path.read_text()):
        first, *words = command.replace("…", "x").replace("...", " ").split()[1:] or [""]
        words = [*cli.SHORT.get(first, first).split(), *words]
        found = root
        while (
            words
            and isinstance(found, click.Group)
            and re.fullmatch(r"[a-z0-9-]+", words[0])
            and not words[0].startswith("-")
        ):
            assert words[0] in found.commands, (
                f"{path.name}: `{command}`: there is no command {words[0]}"
            )
            found = found.commands[words.pop(0)]
        known = {"--help", "--install-completion", "--show-completion"}
        known |= {option for p in found.params for option in [*p.opts, *p.secondary_opts]}
        for word in words:
            if word.startswith("--"):
                assert word.split("=")[0].rstrip(".,;:)`") in known, (
                    f"{path.name}: `{command}`: there is no option {word}"
                )


def test_the_check_of_options_can_fail():
    assert commands(
        "text `silodp train --epsilon 3` and\n```\nsilodp plan \\\n  --no-such 1  # why\n```\n"
    ) == [
        "silodp plan --no-such 1",
        "silodp train --epsilon 3",
    ]
