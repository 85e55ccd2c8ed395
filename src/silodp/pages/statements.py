"""The documents in the archive of `silodp export evidence`: registry entry, NIST SP 800-226, EDPB
28/2024, egress, Croissant.

Every statement names its source, a file of the archive or a test of SECURITY.md. Else it is "not
covered". No record is read here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from silodp.core import quality
from silodp.core.figures import rounded_up, shown
from silodp.core.problem.schema import Column, Schema
from silodp.pages.judged import grouped
from silodp.pages.runs import Run
from silodp.pages.unprotected import sentences

UNSTATED = "Not stated."
NOT_COVERED = "not covered"
MODELS = {"isrl": "Federated", "shuffle": "Shuffle", "masks": "Federated", "central": "Central"}
AGAINST = {
    "isrl": (
        "Everyone except the silo itself: the server, the network, the other silos and "
        "the users of the model may collude."
    ),
    "shuffle": "Everyone except the silo itself and the shuffler, which sees each silo's own "
    "counts.",
    "masks": (
        "Everyone except the silo itself, as long as at most the stated number of "
        "other silos collude."
    ),
    "central": "Everyone who sees only what the server publishes. The server and all silos are "
    "trusted.",
}


@dataclass(frozen=True)
class OwnerFacts:
    """Facts that no run folder contains and that its owner may state."""

    name: str = ""
    curators: tuple[str, ...] = ()
    use: str = ""
    region: str = ""
    sector: str = ""
    authors: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        """Return the options that were left out."""
        values = {
            "--curator": self.curators,
            "--use": self.use,
            "--region": self.region,
            "--author": self.authors,
        }
        return [option for option, value in values.items() if not value]


SIMULATED = (
    "A simulation: one process read the records of all silos, and the person who ran "
    "it is trusted. A deployment would protect against: "
)


def trust_of(run: Run) -> str:
    return str(run.about.get("trust", "isrl"))


def against(run: Run) -> str:
    """Return whom a record is protected against."""
    words = AGAINST.get(trust_of(run), "")
    if run.kind == "train":
        return SIMULATED + words[0].lower() + words[1:]
    return words


def covered(run: Run) -> str:
    """Return what a price covers. Evaluations of the run are added. In a federation only the
    ledgers add up everything else.
    """
    if run.kind == "train":
        return "training and evaluations together"
    if any(s.evaluated for s in run.silos):
        return (
            f"training and evaluations together{run.provided}; each silo's ledger adds "
            "profiles and other runs"
        )
    return (
        f"training only{run.provided}; each silo's ledger adds evaluations, profiles and other runs"
    )


def registry(run: Run, owner: OwnerFacts, day: str, version: str) -> str:
    """Return a draft entry for the registry of deployments (OpenDP, schema of July 2026), as YAML
    in its JSON form.
    """
    epsilon, delta = (max(s.together[i] for s in run.silos) for i in (0, 1))
    each = "; ".join(
        f"{s.name}: epsilon {shown(s.together[0])}, delta {rounded_up(s.together[1])}"
        for s in run.silos
    )
    name = owner.name or run.folder.resolve().name
    sector = {}
    if owner.sector:
        sector["data_product_sector"] = owner.sector
    record = "record"
    if run.of_persons:
        record = "person"
    access = "Interactive"
    if run.kind == "train":
        access = "Non-interactive"
    basic = {
        "name": name,
        "data_curators": list(owner.curators) or [UNSTATED],
        "description": (
            f"A model ({run.about.get('model')}) trained by {run.algorithm} over "
            f"{len(run.silos)} silos."
        ),
        "intended_use": owner.use or UNSTATED,
        "data_product_type": "Machine learning model",
        "data_product_region": owner.region or UNSTATED,
        "publication_date": day,
    }
    entry = {
        "url_slug": "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split()),
        "status": "Draft",
        "tier": 3,
        "deployment": {
            "basic": basic | sector,
            "dp_variant": {
                "variant_name": "Approximate DP",
                "data_domain": "Tables of a public schema, or images of a public size, one for each silo.",  # noqa: E501
                "unprotected_quantities": "The number of records of each silo, the schema, and that a silo took part.",  # noqa: E501
            },
            "privacy_loss": {
                "privacy_unit": record,
                "privacy_unit_details": (
                    f"{run.unit} Adjacent data sets of a silo differ in one {record}, "
                    "replaced by any other. The number of records is public."
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
                    "Silos, each with its own gate; couriers; a server; the users of "
                    "the model. Each silo trusts its own gate."
                ),
                "release_type": "Many releases",
                "release_type_details": (
                    f"{run.questions} questions in this run. Each silo's ledger records "
                    "the sum over all runs and is never reset."
                ),
                "data_source_type": "Static",
                "access_type": access,
                "access_type_details": (
                    "Each silo's policy lists the askers by key. All askers share one budget."
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
                    "Features are scaled by public ranges, or by statistics within the "
                    "budget. Settings come from public facts, unless other runs on "
                    "these records chose them."
                ),
                "mechanisms": _mechanisms(run, version),
                "justification": UNSTATED,
            },
            "administrative": {"registry_authors": list(owner.authors) or [UNSTATED]},
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
    """Return a page of statements, each with its source."""
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
    """Return the statements for NIST SP 800-226 (March 2025), one section for each layer of its
    pyramid.
    """
    price = "; ".join(
        f"{s.name} epsilon {shown(s.together[0])}, delta {rounded_up(s.together[1])}"
        for s in run.silos
    )
    deployed = run.kind != "train"
    groups = grouped(run)
    arithmetic = "floating point: a simulation"
    if deployed:
        arithmetic = "exact integers"
    return sheet(
        "NIST SP 800-226, layer by layer",
        (
            "Guidelines for Evaluating Differential Privacy Guarantees (final, March "
            "2025): the facts of this run for each layer."
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
            ("Floating point and sampling of noise", arithmetic, "environment.json"),
            _row(
                deployed,
                "Timing and other side channels",
                "padded by policy (answer_after), or as SECURITY.md describes",
                "SECURITY.md, What to know",
            ),
            _row(
                audited,
                "Attack on the implementation",
                "measured; see audit.json",
                "audit.json",
            ),
            _row(
                bool(run.evaluations),
                "Utility",
                "evaluated by private releases",
                "evaluations.json",
            ),
            _row(
                bool(groups),
                "Bias against small groups",
                " ".join(map(quality.differences, groups)) or NOT_COVERED,
                "evaluations.json",
            ),
            _row(
                deployed,
                "Security of the raw data at the silo",
                "the gate's own user and files; the hospital is responsible for the rest",
                "SECURITY.md, Files",
            ),
            ("Data collection, consent", NOT_COVERED, NOT_COVERED),
        ],
    )


def _row(covers: bool, statement: str, here: str, source: str) -> tuple[str, str, str]:
    """Return a row of a sheet, or one that states "not covered"."""
    if covers:
        return statement, here, source
    return statement, NOT_COVERED, NOT_COVERED


def edpb(run: Run, audited: bool) -> str:
    """Return facts for EDPB Opinion 28/2024 on AI models, and for a DPIA. They never claim
    anonymity.
    """
    unit = "record"
    if run.of_persons:
        unit = "person"
    return sheet(
        "EDPB Opinion 28/2024, and an annex to a DPIA",
        (
            "Facts for judging whether personal data can be extracted from the model. "
            "This page does not claim that the model is anonymous. The controller must "
            "judge that."
        ),
        [
            (
                "Likelihood of extraction, by design",
                (
                    f"bounded: any inference about one {unit} is at most e^epsilon times as likely "
                    "as without its data, apart from delta"
                ),
                "spends.json",
            ),
            _row(
                audited,
                "Tests against attacks",
                "membership by canary, whole transcript",
                "audit.json",
            ),
            (
                "Selection of sources, minimisation",
                "only the columns of the schema; records stay at the silo",
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
                ("a record can be removed from a file; earlier releases cannot be taken back"),
                "SECURITY.md",
            ),
        ],
    )


def egress(run: Run, files: Sequence[str]) -> str:
    """Return what an output checker of a trusted research environment asks for (SATRE 2.0.1,
    3.3.07).
    """
    source = "ledgers.json"
    if run.kind == "train":
        source = "not covered: a simulation"
    return sheet(
        "Egress: what leaves, and who released it",
        "For an output checker (SATRE 2.0.1, section 3.3.07; SACRO's questions).",
        [
            (
                "What leaves the silo",
                (
                    f"{run.answers} private answers to {run.questions} questions, and "
                    "the model computed from them"
                ),
                "questions.json",
            ),
            *_evaluated(run),
            (
                "Statistical disclosure control",
                "differential privacy of every answer, which needs no minimum cell counts",
                "spends.json",
            ),
            (
                "Who released it",
                "each silo's gate, by its officer's policy",
                source,
            ),
            ("Files of this archive", ", ".join(files), "manifest.json"),
            ("Raw records, row-level outputs", "none", "manifest.json"),
        ],
    )


def _evaluated(run: Run) -> list[tuple[str, str, str]]:
    """Return one row for each evaluation, with what it may have cost."""
    rows = []
    for number, found in enumerate(run.evaluations, 1):
        by = ""
        if "groups" in found:
            by = f", by {found['groups']['by']}"
        each = "; ".join(map(_price, found["silos"]))
        rows.append(
            (
                f"Evaluation {number}",
                f"private answers about held-out records{by}: {each}",
                "evaluations.json",
            )
        )
    return rows


def _price(silo: Mapping[str, Any]) -> str:
    if "spent_epsilon" in silo:
        epsilon = f"epsilon {shown(silo['spent_epsilon'])}"
    else:
        epsilon = f"at most epsilon {shown(silo['epsilon'])}"
    return f"{silo['name']} {epsilon} at delta {rounded_up(silo['delta'])}"


def croissant(schema: Schema, name: str) -> str:
    """Return the public schema as Croissant 1.1: the columns, without any value."""

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
            "The public schema of files that stay at their silos. It was not derived "
            "from any record."
        ),
        "distribution": [
            {
                "@type": "cr:FileObject",
                "@id": "silo-file",
                "name": "silo-file",
                "encodingFormat": "text/csv",
                "description": "Stays at each silo; not distributed.",
            }
        ],
        "recordSet": [
            {"@type": "cr:RecordSet", "@id": "records", "name": "records", "field": fields}
        ],
    }
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"
