"""Four made-up hospitals train one model of readmission, without trusting a server or each other.

Run it: `make demo`, or `python examples/demo.py [FOLDER]`. It takes about 20 seconds on two cores
and needs no download. It prints the `silodp` commands that you would type, and their main results.
All hospitals are simulated in one process. docs/quickstart.md continues with real processes.
"""

import csv
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

from silodp.core.figures import rounded_up

MODELS = ("alone", "together", "personal")
FIGURES = ("auc", "log loss")
ROWS_SHOWN = 3


def free_folder() -> Path:
    """Return the first of demo, demo-2, demo-3, ... that does not exist."""
    folder, number = Path("demo"), 1
    while folder.exists():
        number += 1
        folder = Path(f"demo-{number}")
    return folder


def silodp(command: str) -> str:
    """Run a command and return its output. Stop the demo if the command fails."""
    words = [sys.executable, "-m", "silodp.cli", *shlex.split(command)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{done.stdout}{done.stderr}\nThe demo stopped at this command.")
    return done.stdout


def step(folder: Path, command: str) -> None:
    """Show a command and run it. Its output goes to the end of log.txt."""
    print(f"\n$ silodp {command}", flush=True)
    output = silodp(command)
    with (folder / "log.txt").open("a") as log:
        log.write(f"$ silodp {command}\n{output}\n")


def show_comparison(run: Path) -> None:
    """Print the quality of three models at each hospital, on its held-out patients."""
    found = json.loads((run / "personal.json").read_text())
    summary = json.loads((run / "summary.json").read_text())
    epsilon = rounded_up(max(silo["spent_epsilon"] for silo in summary["silos"]))
    print(f"  One model of {summary['parameters']} numbers, chosen from public facts.")
    print(f"  Noise was added inside each hospital. It spent at most epsilon {epsilon}.\n")
    print("  held-out patients         AUC (1 is perfect)      log loss (0 is perfect)")
    heads = "".join(f"{model:>9}" for model in MODELS)
    print(f"  {'hospital':<9}{'patients':>9}{heads}{heads}")
    rows = [(silo["name"], silo["held_out"], silo["figures"]) for silo in found["silos"]]
    rows.append(("all", sum(count for _, count, _ in rows), found["all"]))
    for name, count, figures in rows:
        cells = "".join(f"{figures[model][figure]:>9.3f}" for figure in FIGURES for model in MODELS)
        print(f"  {name:<9}{count:>9}{cells}")
    print("  alone: the hospital's own records, without noise    together: the private model")
    print("  personal: the private model, fitted further inside the hospital, at no price")


def show_evaluation(run: Path) -> None:
    """Print what the private evaluation found, and the epsilon of everything so far."""
    *_, last = (run / "evaluations.jsonl").read_text().splitlines()
    summary = json.loads((run / "summary.json").read_text())
    figures = json.loads(last)["scores"][0]["figures"]
    for name in ("auc", "accuracy"):
        found = figures[name]
        text = f"{found['value']:.2f} (interval {found['low']:.2f} to {found['high']:.2f})"
        if found["too_noisy"]:
            text = "too noisy to say"
        print(f"  {name:<9}{text}")
    most = max(silo["in_all"]["epsilon"] for silo in summary["silos"])
    print(f"  Training and this evaluation together spent at most epsilon {rounded_up(most)}.")


def show_risks(risks: Path) -> None:
    """Print the first rows of the predictions."""
    with risks.open() as file:
        rows = list(csv.reader(file))
    for row in rows[: ROWS_SHOWN + 1]:
        print("  " + "".join(f"{cell[:9]:<11}" for cell in row))
    print(f"  ... {len(rows) - 1} patients in {risks}")


def main(folder: Path) -> None:
    """Run the whole demo in a new folder."""
    started = time.perf_counter()
    run = folder / "runs/train"
    risks = folder / "risks.csv"
    print("Which patients will be readmitted? Four hospitals train one model together.")
    print("They show no records and trust no server. All patients are made up.")
    step(folder, f"init {folder} --demo")
    step(folder, f"train --project {folder} --held-out 0.2")
    show_comparison(run)
    step(folder, f"evaluate {run} --epsilon 2")
    show_evaluation(run)
    step(folder, f"predict {run} {folder}/data/test.csv --keep age --keep ward --out {risks}")
    show_risks(risks)
    step(folder, f"report {run}")
    print(f"  Open {run}/report.html in a browser.")
    seconds = time.perf_counter() - started
    print(f"\nDone in {seconds:.0f} seconds. {folder}/log.txt has all that the commands printed.")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else free_folder())
