"""Schemas to start from, for extracts in a common form: `silodp init --template omop | fhir`. They
are complete; remove the columns that a study does not use.
"""

HEAD = """\
# The public schema of {form} extracts: one row for each person, and one column for each entry below. Remove the columns that the
# study does not use. Set ranges to what is physically possible, not to the values in a hospital's file. This file is public.

ignore = ["{person}"]
"""  # noqa: E501
NUMBER = """
[columns.{name}]                   # {where}
type = "number"
range = {range}
missing = {missing}
indicator = true
"""
CATEGORY = """
[columns.{name}]                   # {where}
type = "category"
categories = {categories}
missing = "own"
"""
LABEL = """
[label]
column = "outcome"                 # {where}
task = "binary"
classes = ["0", "1"]
"""
MEASURED = (
    ("systolic", "[60, 260]", 130, "3004249", "8480-6"),
    ("diastolic", "[30, 160]", 80, "3012888", "8462-4"),
    ("heart_rate", "[30, 220]", 75, "3027018", "8867-4"),
    ("weight", "[2, 300]", 80, "3025315", "29463-7"),
    ("height", "[40, 230]", 170, "3036277", "8302-2"),
    ("haemoglobin", "[3, 25]", 13, "3000963", "718-7"),
    ("creatinine", "[0.1, 20]", 1, "3016723", "2160-0"),
    ("sodium", "[100, 180]", 140, "3019550", "2951-2"),
)
"""Name, range, public value to fill in, the OMOP concept and the LOINC code; mmHg, beats a minute,
kg, cm, g/dl, mg/dl, mmol/l.
"""


def _measured(omop: bool) -> str:
    columns = []
    for name, limits, missing, concept, loinc in MEASURED:
        if omop:
            where = (
                f"MEASUREMENT.value_as_number, concept {concept}, the last before the index date"
            )
        else:
            where = f"Observation.valueQuantity, LOINC {loinc}, the last before the index date"
        columns.append(NUMBER.format(name=name, range=limits, missing=missing, where=where))
    return "".join(columns)


TEMPLATES = {
    "omop": HEAD.format(form="OMOP CDM 5.4", person="person_id")
    + NUMBER.format(
        name="age",
        range="[0, 110]",
        missing=60,
        where="year of the index date less PERSON.year_of_birth",
    )
    + CATEGORY.format(
        name="gender",
        categories='["8507", "8532", "other"]',
        where="PERSON.gender_concept_id: male, female",
    )
    + CATEGORY.format(
        name="visit",
        categories='["9201", "9202", "9203", "262", "other"]',
        where="VISIT_OCCURRENCE.visit_concept_id: inpatient, outpatient, emergency, both",
    )
    + _measured(True)
    + LABEL.format(where="1 if the person is in the outcome's COHORT within the time at risk"),
    "fhir": HEAD.format(form="FHIR R4", person="Patient.id")
    + NUMBER.format(
        name="age",
        range="[0, 110]",
        missing=60,
        where="years from Patient.birthDate to the index date",
    )
    + CATEGORY.format(
        name="gender", categories='["male", "female", "other", "unknown"]', where="Patient.gender"
    )
    + CATEGORY.format(
        name="class",
        categories='["AMB", "EMER", "IMP", "other"]',
        where="Encounter.class.code of the index encounter",
    )
    + CATEGORY.format(
        name="smoking",
        categories='["449868002", "428041000124106", "8517006", "266919005", "other"]',
        where="Observation 72166-2, SNOMED: daily, some days, former, never",
    )
    + _measured(False)
    + LABEL.format(
        where="1 if a Condition of the outcome's value set has its onset within the time at risk"
    ),
}
