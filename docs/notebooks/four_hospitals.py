# ---
# jupyter:
#   jupytext: {formats: "ipynb,py:percent"}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Four hospitals' tables
#
# Four hospitals want one model of who is readmitted. None of them gives its patients' rows to
# anybody. **About ten seconds**, on one core, with nothing to download.
#
# You need `pip install silodp` and a notebook. Everything here is a simulation in one process: it
# computes and prices what a real federation would.

# %%
import matplotlib.pyplot as plt
import pandas as pd

import silodp

frames = silodp.hospitals()  # made up from a formula: nobody's records, so we may look
{name: len(frame) for name, frame in frames.items()}

# %% [markdown]
# The tables are as unlike as real ones: columns in another order, yes and no spelled in their own
# way, holes.

# %%
frames["west"].head(3)

# %% [markdown]
# ## What is public A schema says what every table holds. All of it is public knowledge: ranges and
# categories come from what everybody knows, never from a record.

# %%
schema = {
    "ignore": ["patient_id"],
    "columns": {
        "age": {"type": "number", "range": [18, 100], "missing": 60},
        "systolic": {"type": "number", "range": [80, 220], "missing": 130},
        "sex": {"type": "category", "categories": ["female", "male", "other"]},
        "smoker": {"type": "boolean", "missing": False},
        "ward": {
            "type": "category",
            "categories": ["medicine", "surgery", "cardiology"],
            "missing": "own",
        },
    },
    "label": {"column": "readmitted", "task": "binary", "classes": ["no", "yes"]},
}

# %% [markdown]
# ## Train Epsilon is what anybody may learn about one row from everything its hospital has said. A
# fifth of each hospital's rows is kept out, to test on. Leave out `settings` and silodp chooses
# them from public facts alone, in a few seconds more; `trained.chosen` then says what it chose and
# what to expect. (`seed` makes this page the same every time. Known noise protects nobody: leave it
# out with real records.)

# %%
settings = {
    "model": "logistic",
    "algorithm": "momentum",
    "rounds": 50,
    "step": 2,
    "clip": 1,
    "weights": "records",
    "output": "tail",
}
trained = silodp.train(frames, schema=schema, epsilon=3, held_out=0.2, seed=1, **settings)
trained.spent

# %% [markdown]
# ## How good is it? The test rows are private too, so the answer is noisy and has a price. `low`
# and `high` are 95 % intervals, noise included; what the noise hides is marked and has no value.

# %%
trained.evaluate(epsilon=2, seed=1).round(3)

# %% [markdown]
# What adds up is not epsilon but its square, roughly: training for 3 and testing for 2 is less than
# 5.

# %%
trained.spent

# %% [markdown]
# ## Use it The model has been paid for, and to use it costs nothing. Here are patients whom no
# hospital has seen, and how the risk goes up with age.

# %%
new = silodp.hospitals(seed=1)["north"]
risk = trained.predict(new)
pd.concat([new, risk], axis=1).head(3)

# %%
ages = pd.DataFrame({"age": range(20, 96), "systolic": 130, "sex": "female", "ward": "medicine"})
for word, smokes in (("smokes", True), ("does not smoke", False)):
    plt.plot(ages["age"], trained.predict(ages.assign(smoker=smokes))["risk_yes"], label=word)
plt.xlabel("age")
plt.ylabel("risk of readmission")
plt.legend()
plt.title("What four hospitals learnt together, at epsilon 3 a row")
plt.show()

# %% [markdown]
# **Next**: [the same over a network](../quickstart.md), [what each figure
# means](../use.md#how-good-is-it), [who protects what from whom](../guarantees.md).
