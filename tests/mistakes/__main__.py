"""Plant every known mistake and report whether the probes catch it: `make mutants`.

The exit code is 1 if a planted mistake survives, or if the pipeline as shipped fails a probe.
"""

import sys

from mistakes.mutants import examine_all
from silodp.cli.console import progress, say, show, table


def main() -> int:
    """Print one row for each planted mistake. Return the exit code."""
    with progress("probes of the shipped pipeline, and mutants", quiet=False) as tick:
        rows, shipped = examine_all(0, tick=tick)
    caught = sum(row["caught"] for row in rows)
    cells = (
        (row["mutant"], "yes" if row["caught"] else "NO", row["caught_by"], row["says"])
        for row in rows
    )
    title = f"{caught} of {len(rows)} planted mistakes were caught"
    show(table("mutant|caught|by|what the first probe says", cells, title=title))
    if shipped:
        say("The pipeline as shipped FAILS:")
    else:
        say("The pipeline as shipped passes every probe.")
    for probe, reason in shipped.items():
        say(f"  {probe}: {reason}")
    return int(caught < len(rows) or bool(shipped))


if __name__ == "__main__":
    sys.exit(main())
