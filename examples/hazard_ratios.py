"""Hazard ratios over four hospitals, by a Cox regression with intervals that include the privacy
noise, and a log-rank test.

Run it: `python examples/hazard_ratios.py`. It takes ten seconds and needs no download. It simulates
the hospitals in this process.
"""

import numpy as np
import pandas as pd

from silodp import stats

random = np.random.default_rng(0)


def hospital(patients: int) -> pd.DataFrame:
    """Return made-up patients. Treatment halves the hazard, and ten years add a third to it."""
    age = random.uniform(30, 90, patients)
    treated = random.choice(["yes", "no"], patients)
    stage = random.choice(["I", "II", "III"], patients, p=[0.4, 0.35, 0.25])
    risk = 0.03 * (age - 60) - 0.7 * (treated == "yes")
    risk += 0.4 * (stage == "II") + 0.8 * (stage == "III")
    months = random.exponential(40 / np.exp(risk))
    lost = random.uniform(6, 72, patients)
    return pd.DataFrame(
        {
            "age": age.round(),
            "treated": treated,
            "stage": stage,
            "months": np.minimum(months, lost).round(1),
            "died": np.where(months <= lost, "yes", "no"),
        }
    )


hospitals = {name: hospital(n) for name, n in zip("ABCD", (500, 400, 350, 550), strict=True)}

# The schema is public: it has the range of each number, and the time bins of the follow-up.
schema = {
    "columns": {
        "age": {"type": "number", "range": [20, 100]},
        "treated": {"type": "boolean"},
        "stage": {"type": "category", "categories": ["I", "II", "III"]},
    },
    "label": {
        "task": "survival",
        "time": "months",
        "event": "died",
        "edges": [3, 6, 9, 12, 18, 24, 30, 36, 48, 60],
    },
}

fit = stats.cox(hospitals, schema=schema, epsilon=3, trust="masks", seed=1)
table = fit.table[["exp_coef", "exp_lower_95", "exp_upper_95", "p"]]
print("Hazard ratios:")
print(table.round(3).to_string())

test = stats.logrank(hospitals, schema=schema, by="treated", epsilon=1, trust="masks", seed=1)
print(f"\nLog-rank test of treatment: p = {test.details['p']:.2g}")

print("\nSpent on the ratios:")
print(fit.spent.to_string())
