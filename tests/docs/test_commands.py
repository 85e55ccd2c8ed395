"""What the pages tell people to type works: two are run from an empty folder, and every option
shown anywhere exists.
"""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import click
import pytest
import typer

from silodp.cli import app as cli
from silodp.cli import console
from silodp.server.advice import candidates, chooser, trusts

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
def brief(monkeypatch):
    """The advisor tries less on fewer made-up records, and says the same sentences: what it finds
    by all of it is tests/server/advice's. Not with SILODP_LONG=1.
    """
    if "SILODP_LONG" not in os.environ:
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
    """Without its numbers, for what a simulation finds: another processor rounds otherwise."""
    return re.sub(r"\d[\d.]*(e-\d+)?", "#", text)


@pytest.mark.parametrize(
    ("name", "seen", "least"),
    [
        pytest.param("quickstart.md", str, 14, marks=pytest.mark.xdist_group("federation-flower")),
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


def test_the_four_commands_of_the_readme_lead_to_a_report_from_one_folder(type_in):
    block = re.search(
        r"^python3 -m venv.*?^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    commands = [
        line.partition(" # ")[0].strip()
        for line in block[0].splitlines()
        if line.startswith("silodp ")
    ]
    assert [command.split()[1] for command in commands] == ["init", "train", "evaluate", "report"]
    # the choice, and all its rounds, are the quickstart's walk
    short = " --algorithm mb-sgd --model logistic --rounds 2"
    for command in commands:
        code, printed = type_in(command + (short if " train " in command else ""))
        assert code == 0, printed
    assert Path("trial/runs/train/report.html").is_file()


def test_the_comparison_of_output_can_fail():
    assert says("a  7\n\nb\n", ["a …", "b"])
    assert says("x\ny\nz\n", ["…", "z"])
    assert not says("a 7\nb\n", ["a …"])
    assert not says("a 7\nb\n", ["a 8", "b"])
    assert not says("x\n", ["…", "z"])
    assert says("a long line\n", ["a long", "line"])
    assert not says(loose("a 7 %\n"), [loose("b 7 %")])


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
        words = command.replace("…", "x").replace("...", " ").split()[1:]
        found = root
        while (
            words
            and isinstance(found, click.Group)
            and re.fullmatch(r"[a-z-]+", words[0])
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
