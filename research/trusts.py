"""What docs/trust.md says: all trusts side by side, their errors, and what of it is chance."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from research.compare import improvement, read_table
from research.study import AGAIN, COLLUDING, PAIRED, TRUST, Study

TRUSTS = """# Who is trusted, and what that costs

| | isrl | masks | shuffle | central |
|---|---|---|---|---|
| you trust, besides your own silo | nobody | all but c of the other silos to add their noise; that X25519, HKDF and ChaCha20 hold | a shuffler to add up and forget; all but c of the other silos to add their noise | the server, the network, all other silos |
| the server sees of a round | your silo's own noisy answer | one total under the noise of all | one total under the noise of all | every record |
| noise of the mean over N silos, central DP being 1 | sqrt(N) | sqrt(N / (N - c)) | sqrt(N / (N - c)) | 1 |
| if the server colludes with c others | the same | the same: their noise is not counted on | the same, with `colluding` set to c | |
| if all others collude | the same | your numbers under your own share: the second epsilon that plan, run and ledger show | the same, and the shuffler alone sees that much | |
| epsilon in the example below, and that second one | 0.75 | 0.75, 4.35 | 0.75, 4.35 | 0.75 against readers of the model |
| what can be asked | everything | everything but local steps | everything but local steps | means |
| if a silo drops out in mid-round | the mean is over the others | asked again without it, at a new price (`--drops`) | the total is over the others, down to the quorum | |
| bytes of an answer, a parameter | 3 to 6 | 4, or 8 where a total could pass 2^31 | 8 | |
| MNIST, 25 silos, MB-SGD, epsilon 0.75: error | {mnist} |
| WBCD, 2 silos, logistic, 25 rounds of momentum, epsilon 0.75: error, 10 splits | 8.2 ± 0.9 % | 7.7 ± 0.7 % | 7.7 ± 0.7 % | 6.7 ± 0.8 % |
| how | the default | `--trust masks --colluding c` | `--trust shuffle` | `--trust central`, in simulation |

Trusts differ in the share of noise and in who adds the numbers, and in nothing else. A silo's answer to a total is its verified integer sum plus its share of rounded Gaussian noise.
Every silo adds the same share. The price is exact, by the rule gdp, and one ledger adds up answers and totals. [tightness.md](tightness.md) has the proof. Two silos hide little from
each other: masks are worth their trouble from about four on.

The errors of masks and shuffle in this table and below were measured with the binomial noise of earlier versions, which was 1.09 times as large.
"""  # noqa: E501


def one_screen(rows: Sequence[dict]) -> str:
    """All trusts side by side, with the errors of the study on MNIST at its smallest epsilon, as
    far as there are.
    """
    by = {r["curve"]: f"{100 * r['test_error']:.2f} %" for r in rows if r["epsilon"] == 0.75}
    isrl, total, central = (
        by.get(curve, "") for curve in ("mb-sgd", "mb-sgd-shuffle", "mb-sgd-central")
    )
    if "mb-sgd-masks" in by:
        wary = f", {by['mb-sgd-masks']} with c = {COLLUDING}"
    else:
        wary = ""
    return TRUSTS.format(mnist=f"{isrl} | {total} with c = 0{wary} | {total} | {central}")


def trust_table(rows: Sequence[dict], study: Study) -> list[str]:
    """Test errors by epsilon, and SDP's distance from central DP."""
    by = {(r["curve"], r["epsilon"]): r for r in rows}
    masked = any(curve == "mb-sgd-masks" for curve, _ in by)
    if masked:
        more = f" masks, {COLLUDING} may collude | that over central |"
    else:
        more = ""
    lines = [
        f"| epsilon | method | ISRL-DP | SDP, masks | central DP | that over central |{more}",
        "|---:|---|---:|---:|---:|---:|" + "---:|" * (2 * masked),
    ]
    for e in study.epsilons:
        for name, isrl in (("MB-SGD", "mb-sgd"), ("SPIDER", "spider-diff")):
            three = [by[c, e] for c in (isrl, f"{name.lower()}-shuffle", f"{name.lower()}-central")]
            cells = " | ".join(_error(r) for r in three)
            wary = by.get((f"{name.lower()}-masks", e))
            if wary:
                last = f" {_error(wary)} | {_over(wary, three[2])} |"
            else:
                last = ""
            lines.append(f"| {e:g} | {name} | {cells} | {_over(three[1], three[2])} |{last}")
    return lines


def paired(name: str, tables: Path) -> list[str]:
    """Totals over central DP, with splits and steps enough to tell them apart."""
    study = f"{name.replace('trust', 'masks')}-pairs"
    if not (tables / f"{study}.csv").exists():
        return []
    by = {(r["curve"], r["epsilon"]): r for r in read_table(tables / f"{study}.csv")}
    lines = [
        (
            f"| epsilon | central DP | SDP, masks | that over central | masks, {COLLUDING} may "
            "collude | that over central |"
        ),
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for e in sorted({e for _, e in by}):
        central, total, wary = (
            by[f"mb-sgd-{trust}", e] for trust in ("central", "shuffle", "masks")
        )
        lines.append(
            f"| {e:g} | {_error(central)} | {_error(total)} | {_over(total, central)} | "
            f"{_error(wary)} | {_over(wary, central)} |"
        )
    return [
        "### How far are totals from central DP?\n",
        (
            "In the table above the step is one of five, picked by the training loss over five "
            "splits. At epsilon 0.75 two of them have nearly the same "
            "training loss and test errors that are a tenth apart, so that a cell says more "
            "about the step than about the trust. MB-SGD at the smallest "
            f"epsilons with other draws of the noise, {PAIRED[study].trials} splits and finer "
            f"steps (`python -m research figures {study} --data-dir DIR`, "
            f"[table](figures/{study}.csv)):\n"
        ),
        "\n".join(lines) + "\n",
    ]


def chance(rows: Sequence[dict], name: str, tables: Path) -> list[str]:
    """Why a shuffled total may come out below central DP: the same comparison of SPIDER with other
    draws of the noise.
    """
    again = [
        read_table(tables / f"{other}.csv")
        for other in AGAIN
        if other.startswith(name) and (tables / f"{other}.csv").exists()
    ]
    if not again:
        return []
    epsilons = TRUST[name].epsilons
    draws = [
        {
            e: -improvement(
                [r for r in one if r["epsilon"] == e], "spider-central", "spider-shuffle"
            )
            for e in epsilons
        }
        for one in (rows, *again)
    ]
    below = [sum(change < 0 for change in one.values()) for one in draws]
    lines = [
        "| draw | " + " | ".join(f"epsilon {e:g}" for e in epsilons) + " |",
        "|---|" + "---:|" * len(epsilons),
    ]
    for at, one in enumerate(draws):
        lines.append(
            f"| {at or 'the table above'} | "
            + " | ".join(f"{one[e]:+.1f} %" for e in epsilons)
            + " |"
        )
    others = [statistics.mean(one[e] for one in draws[1:]) for e in epsilons]
    lines.append(
        "| mean of the others | " + " | ".join(f"{change:+.1f} %" for change in others) + " |"
    )
    return [
        "### Is a shuffled total better than central DP?\n",
        (
            "No. The table has SPIDER's error under SDP below that under central DP at "
            f"{below[0]} of {len(epsilons)} epsilons, and that is chance. At "
            "the same budget the two are nearly the same mechanism: a total's noise has 1.1 to "
            "2.7 % more standard deviation than central DP's by the "
            "same Renyi accounting, with the same shares for anchors and differences, and "
            "exact accounting would let central DP have 4.4 to 6.8 % less. "
            "The cells of a column are not seven trials: under central DP all epsilons share "
            "one draw of the noise for each split. And from epsilon 6 on "
            "the steps 0.75 and 1 have nearly the same training loss, so that chance picks "
            "one, and the test error moves by about 5 % with it. "
            f"SPIDER's SDP over central DP, with {len(again)} other draws on the same splits "
            "(`python -m research figures trust --data-dir DIR`):\n"
        ),
        "\n".join(lines) + "\n",
        (
            f"With the other draws SDP is below in {sum(below[1:])} of "
            f"{len(again) * len(epsilons)} cells.\n"
        ),
    ]


def _error(row: dict) -> str:
    return f"{100 * row['test_error']:.2f} ± {100 * row['standard_error']:.2f}"


def _over(row: dict, other: dict) -> str:
    return f"{100 * (row['test_error'] / other['test_error'] - 1):+.1f} %"
