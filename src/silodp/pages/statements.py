"""What the archive of `silodp export evidence` says in other people's forms: registry entry, NIST
SP 800-226, EDPB 28/2024, egress, Croissant.

Every statement names its source, a file of the archive or a test of SECURITY.md, or says "not
covered". Nothing here reads a record.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from silodp.core import quality
from silodp.core.figures import shown
from silodp.core.privacy.accounting import rounded_up
from silodp.core.problem.schema import Column, Schema
from silodp.pages.judged import grouped
from silodp.pages.runs import Run
from silodp.pages.unprotected import sentences

UNTOLD = "Not stated."
NOT_COVERED = "not covered"
MODELS = {"isrl": "Federated", "shuffle": "Shuffle", "masks": "Federated", "central": "Central"}
AGAINST = {
    "isrl": (
        "Everybody but the silo itself: the server, the network, the other silos and whoever "
        "gets the model may collude."
    ),
    "shuffle": "Everybody but the silo itself and the shuffler, which sees each silo's own counts.",
    "masks": (
        "Everybody but the silo itself, as long as at most the stated number of other silos "
        "collude."
    ),
    "central": "Whoever sees what the server publishes. The server and all silos are trusted.",
}


@dataclass(frozen=True)
class Told:
    """What no run folder knows and its owner may say."""

    name: str = ""
    curators: tuple[str, ...] = ()
    use: str = ""
    region: str = ""
    sector: str = ""
    authors: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        """The options that were left out, for a sentence."""
        said = {
            "--curator": self.curators,
            "--use": self.use,
            "--region": self.region,
            "--author": self.authors,
        }
        return [option for option, value in said.items() if not value]


SIMULATED = (
    "A simulation: one process held the records of all silos, and whoever ran it is trusted. "
    "What would be protected in a deployment: "
)


def trust_of(run: Run) -> str:
    return str(run.about.get("trust", "isrl"))


def against(run: Run) -> str:
    """From whom a record is protected."""
    words = AGAINST.get(trust_of(run), "")
    if run.kind == "train":
        return SIMULATED + words[0].lower() + words[1:]
    return words


def covered(run: Run) -> str:
    """What a price is of: evaluations of the run are added up, and of a federation only ledgers add
    all the rest.
    """
    if run.kind == "train":
        return "training and evaluations together"
    if any(s.evaluated for s in run.silos):
        return (
            f"training and evaluations together{run.provided}; profiles and other runs are in "
            "each silo's ledger"
        )
    return (
        f"training alone{run.provided}; evaluations, profiles and other runs are in each "
        "silo's ledger"
    )


def registry(run: Run, told: Told, day: str, version: str) -> str:
    """An entry for the registry of deployments (OpenDP, schema of July 2026), as a draft; YAML in
    its JSON form.
    """
    epsilon, delta = (max(s.together[i] for s in run.silos) for i in (0, 1))
    each = "; ".join(
        f"{s.name}: epsilon {shown(s.together[0])}, delta {rounded_up(s.together[1])}"
        for s in run.silos
    )
    name = told.name or run.folder.resolve().name
    basic = {
        "name": name,
        "data_curators": list(told.curators) or [UNTOLD],
        "description": (
            f"A model ({run.about.get('model')}) trained by {run.algorithm} over "
            f"{len(run.silos)} silos."
        ),
        "intended_use": told.use or UNTOLD,
        "data_product_type": "Machine learning model",
        "data_product_region": told.region or UNTOLD,
        "publication_date": day,
    }
    entry = {
        "url_slug": "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split()),
        "status": "Draft",
        "tier": 3,
        "deployment": {
            "basic": basic | ({"data_product_sector": told.sector} if told.sector else {}),
            "dp_variant": {
                "variant_name": "Approximate DP",
                "data_domain": "Tables of a public schema, or images of a public size, one for each silo.",  # noqa: E501
                "unprotected_quantities": "The number of records of each silo, the schema, and that a silo took part.",  # noqa: E501
            },
            "privacy_loss": {
                "privacy_unit": "person" if run.of_persons else "record",
                "privacy_unit_details": (
                    f"{run.unit} Adjacent data sets of a silo differ in one, replaced by any "
                    "other; their number is public."
                ),
                "privacy_parameters": {
                    "epsilon": float(shown(epsilon)),
                    "delta": float(rounded_up(delta)),
                },
                "privacy_parameters_details": f"The largest over silos, {covered(run)}. {each}.",
            },
            "deployment_model": {
                "model_name": MODELS.get(trust_of(run), "Federated"),
                "model_name_details": against(run),
                "actors": (
                    "Silos, each with a gate of its own; couriers; a server; whoever gets the "
                    "model. Each silo trusts its own gate."
                ),
                "release_type": "Many releases",
                "release_type_details": (
                    f"{run.questions} questions in this run; each silo's ledger keeps the sum "
                    "over all runs, which is never reset."
                ),
                "data_source_type": "Static",
                "access_type": "Non-interactive" if run.kind == "train" else "Interactive",
                "access_type_details": (
                    "Askers are listed by key in each silo's policy and share one budget, "
                    "whether they collude or not."
                ),
            },
            "accounting": {
                "post_processing": (
                    "Averaging over silos and the steps of the algorithm; no further access to "
                    "records."
                ),
                "composition": f"Adaptive composition by the rule {run.rule}, charged before each answer.",  # noqa: E501
            },
            "implementation": {
                "preprocessing_and_hyperparameter_tuning": (
                    "Features by public ranges, or by statistics within the budget; settings "
                    "from public facts, unless other runs on these records chose them."
                ),
                "mechanisms": _mechanisms(run, version),
                "justification": UNTOLD,
            },
            "administrative": {"registry_authors": list(told.authors) or [UNTOLD]},
        },
    }
    return json.dumps(entry, indent=1, ensure_ascii=False) + "\n"


def _mechanisms(run: Run, version: str) -> str:
    if run.kind == "train":
        noise = (
            "Gaussian noise, simulated in floating point: this run was a simulation, in one process"
        )
    else:
        noise = (
            "discrete noise on an integer lattice from the operating system's entropy, sums "
            "exact in integers"
        )
    return (
        f"silodp {version}: whole records are clipped, then {noise}. Timing: replies can be "
        "padded by policy. Records are read by the silo's gate process alone."
    )


def sheet(title: str, plain: str, rows: Sequence[tuple[str, str, str]]) -> str:
    """A page of statements, each with where it comes from."""
    lines = [
        f"# {title}",
        "",
        plain,
        "",
        "| statement | here | source |",
        "|---|---|---|",
        *(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def nist(run: Run, audited: bool) -> str:
    """NIST SP 800-226 (March 2025), a section per layer of its pyramid."""
    price = "; ".join(
        f"{s.name} epsilon {shown(s.together[0])}, delta {rounded_up(s.together[1])}"
        for s in run.silos
    )
    deployed = run.kind != "train"
    groups = grouped(run)
    return sheet(
        "NIST SP 800-226, layer by layer",
        (
            "Guidelines for Evaluating Differential Privacy Guarantees (final, March 2025): "
            "what this run says to each layer."
        ),
        [
            ("Privacy parameter", f"{price}, of {covered(run)}", "spends.json"),
            ("Unit of privacy", run.unit, "run.json"),
            (
                "Neighbouring data sets",
                "replace one; the number of records is public",
                "SECURITY.md, first page",
            ),
            ("Trust model", against(run), "run.json"),
            (
                "Mechanism",
                "clipped sums with noise; the sensitivity follows from the clip",
                "questions.json",
            ),
            ("Composition", f"rule {run.rule}, over all answers", "spends.json"),
            (
                "Floating point and sampling of noise",
                "exact integers" if deployed else "floating point: a simulation",
                "environment.json",
            ),
            (
                "Timing and other side channels",
                "padded by policy (answer_after), or as SECURITY.md says"
                if deployed
                else NOT_COVERED,
                "SECURITY.md, What to know" if deployed else NOT_COVERED,
            ),
            (
                "Attack on the implementation",
                "measured; see audit.json" if audited else NOT_COVERED,
                "audit.json" if audited else NOT_COVERED,
            ),
            (
                "Utility",
                "evaluated by private releases" if run.evaluations else NOT_COVERED,
                "evaluations.json" if run.evaluations else NOT_COVERED,
            ),
            (
                "Bias against small groups",
                " ".join(map(quality.differences, groups)) or NOT_COVERED,
                "evaluations.json" if groups else NOT_COVERED,
            ),
            (
                "Security of the raw data at the silo",
                "the gate's own user and files; the rest is the hospital's"
                if deployed
                else NOT_COVERED,
                "SECURITY.md, Files" if deployed else NOT_COVERED,
            ),
            ("Data collection, consent", NOT_COVERED, NOT_COVERED),
        ],
    )


def edpb(run: Run, audited: bool) -> str:
    """Facts for EDPB Opinion 28/2024 on AI models, and for a DPIA. Never a claim of anonymity."""
    return sheet(
        "EDPB Opinion 28/2024, and an annex to a DPIA",
        (
            "Facts for the judgement whether personal data can be extracted from the model. "
            "This page does not claim that the model is anonymous: that is for the controller "
            "to judge."
        ),
        [
            (
                "Likelihood of extraction, by design",
                (
                    "bounded: whatever is inferred about one "
                    f"{'person' if run.of_persons else 'record'} is at most e^epsilon times as "
                    "likely with it as without, but for delta"
                ),
                "spends.json",
            ),
            (
                "Tests against attacks",
                "membership by canary, whole transcript" if audited else NOT_COVERED,
                "audit.json" if audited else NOT_COVERED,
            ),
            (
                "Selection of sources, minimisation",
                "columns of the schema alone; records stay at the silo",
                "model-card.md",
            ),
            ("Who could have access to what", against(run), "run.json"),
            (
                "Risks that remain",
                " ".join(sentences(run)[:4]),
                "model-card.md, What is not protected",
            ),
            ("Legal basis, necessity, balancing", NOT_COVERED, NOT_COVERED),
            (
                "Rights of the persons concerned",
                (
                    "a record can be removed from a file; what was released before cannot be taken "
                    "back"
                ),
                "SECURITY.md",
            ),
        ],
    )


def egress(run: Run, files: Sequence[str]) -> str:
    """What an output checker of a trusted research environment asks (SATRE 2.0.1, 3.3.07)."""
    return sheet(
        "Egress: what leaves, and on whose word",
        "For an output checker (SATRE 2.0.1, section 3.3.07; SACRO's questions).",
        [
            (
                "What leaves the silo",
                (
                    f"{run.answers} private answers to {run.questions} questions, and the model "
                    "made of them"
                ),
                "questions.json",
            ),
            *_evaluated(run),
            (
                "Statistical disclosure control",
                "differential privacy of every answer; no minimum cell counts are needed for it",
                "spends.json",
            ),
            (
                "Who released it",
                "each silo's gate, by its officer's policy",
                "ledgers.json" if run.kind != "train" else "not covered: a simulation",
            ),
            ("Files of this archive", ", ".join(files), "manifest.json"),
            ("Raw records, row-level outputs", "none", "manifest.json"),
        ],
    )


def _evaluated(run: Run) -> list[tuple[str, str, str]]:
    """What each evaluation may have cost, in one line."""
    rows = []
    for number, found in enumerate(run.evaluations, 1):
        if "groups" in found:
            by = f", by {found['groups']['by']}"
        else:
            by = ""
        each = "; ".join(
            (
                f"{s['name']} {'epsilon' if 'spent_epsilon' in s else 'at most epsilon'} "
                f"{shown(s.get('spent_epsilon', s['epsilon']))} at delta "
                f"{rounded_up(s['delta'])}"
            )
            for s in found["silos"]
        )
        rows.append(
            (
                f"Evaluation {number}",
                f"private answers about held-out records{by}: {each}",
                "evaluations.json",
            )
        )
    return rows


def croissant(schema: Schema, name: str) -> str:
    """The public schema as Croissant 1.1: what columns there are, not a value of them."""

    def kind(column: Column) -> str:
        return {"number": "sc:Float", "boolean": "sc:Boolean"}.get(column.type, "sc:Text")

    columns: list[tuple[str, str]] = [(c.name, kind(c)) for c in schema.columns]
    fields = [
        {
            "@type": "cr:Field",
            "@id": f"records/{n}",
            "name": n,
            "dataType": k,
            "source": {"fileObject": {"@id": "silo-file"}, "extract": {"column": n}},
        }
        for n, k in [*columns, (schema.label.name, "sc:Text")]
    ]
    whole: Mapping[str, Any] = {
        "@context": {
            "@vocab": "https://schema.org/",
            "sc": "https://schema.org/",
            "cr": "http://mlcommons.org/croissant/",
            "conformsTo": "http://purl.org/dc/terms/conformsTo",
        },
        "@type": "sc:Dataset",
        "name": name,
        "conformsTo": "http://mlcommons.org/croissant/1.1",
        "isLiveDataset": False,
        "description": (
            "The public schema of files that stay at their silos. Nothing here was read off a "
            "record."
        ),
        "distribution": [
            {
                "@type": "cr:FileObject",
                "@id": "silo-file",
                "name": "silo-file",
                "encodingFormat": "text/csv",
                "description": "Kept at each silo; not distributed.",
            }
        ],
        "recordSet": [
            {"@type": "cr:RecordSet", "@id": "records", "name": "records", "field": fields}
        ],
    }
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"
