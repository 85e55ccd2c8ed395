"""The pictures of the examples in docs/gallery.md: `python docs/make_gallery.py` runs every example
and draws all, `... risk_score` one.
"""

import json
import runpy
import sys
import tempfile
from pathlib import Path

import numpy as np
from drawing import small_picture

DOCS = Path(__file__).parent


def demo(axes, found):
    """The log loss of three models at each hospital, as `make demo` prints it."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "demo")
        found["main"](folder)
        compared = json.loads((folder / "runs/train/personal.json").read_text())
    silos = compared["silos"]
    colours = {"alone": "0.6", "together": "#00796b", "personal": "#c2571a"}
    for k, (model, colour) in enumerate(colours.items()):
        losses = [silo["figures"][model]["log loss"] for silo in silos]
        places = [i + 0.27 * (k - 1) for i in range(len(silos))]
        axes.bar(places, losses, 0.25, color=colour, label=model)
    names = [f"{silo['name']}\n{silo['records']:,} for training" for silo in silos]
    axes.set_xticks(range(len(silos)), names)
    axes.set(ylabel="log loss, less is better", title="One private model for four hospitals")
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def risk_score(axes, found):
    """The weights that are not zero."""
    used = sorted(
        ((weight, name) for name, weight in found["weights"].items() if weight),
        key=lambda pair: -abs(pair[0]),
    )
    axes.barh([name for _, name in used], [weight for weight, _ in used], color="#00796b")
    axes.invert_yaxis()
    axes.set(xlabel="weight in the score", title=f"{len(used)} of 30 features, epsilon 2")


def hazard_ratios(axes, found):
    """The ratios with their intervals."""
    table = found["fit"].table
    for k, (_, row) in enumerate(table.iterrows()):
        axes.plot([row.exp_lower_95, row.exp_upper_95], [k, k], color="#00796b")
        axes.plot(row.exp_coef, k, "o", color="#00796b")
    axes.axvline(1, color="0.6", linewidth=1)
    axes.set_yticks(range(len(table)), list(table.index))
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xticks([0.5, 1, 2, 3], ["0.5", "1", "2", "3"])
    axes.minorticks_off()
    axes.set(xlabel="hazard ratio", title="1,800 patients of four hospitals, epsilon 3")


def own_loss(axes, found):
    """Held-out patients in the order of the predicted median, with both quantiles."""
    targets, predicted = found["main"]()
    order = predicted[:, 0].argsort()
    axes.plot(targets[order] * 100 + 150, ".", color="0.6", label="held-out patients")
    for k, (level, colour) in enumerate(zip(found["LEVELS"], ("#00796b", "#c2571a"), strict=True)):
        axes.plot(
            predicted[order, k] * 100 + 150, color=colour, label=f"predicted {level:.0%} quantile"
        )
    axes.set(
        xlabel="patients, by predicted median",
        ylabel="progression of the disease",
        title="Two quantiles, epsilon 3",
    )
    axes.legend(frameon=False, fontsize=8)


def images_over_the_network(axes, found):
    """Some held-out digits with the risk of being odd, in their own row of pixels."""
    images, outputs = found["main"]("direct")
    odd = outputs.softmax(-1)[:24, 1].tolist()
    tiles = images[:24].reshape(2, 12, 8, 8).numpy()
    axes.imshow(
        np.pad(tiles, ((0, 0), (0, 0), (1, 4), (1, 1)), constant_values=tiles.min())
        .transpose(0, 2, 1, 3)
        .reshape(26, 120),
        cmap="gray",
    )
    for k, share in enumerate(odd):
        axes.text(
            10 * (k % 12) + 4.5,
            13 * (k // 12) + 11,
            f"{share:.0%}",
            color="w",
            ha="center",
            va="center",
            fontsize=7,
        )
    axes.set(title="Odd? Three silos as real processes, epsilon 8")
    axes.axis("off")


def certify_own_function(axes, found):
    """What an attacker sees: the output along the replaced record, with it and without."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 4)), rng.integers(0, 2, 20)
    x[0], y[0] = (3, 0, 0, 0), 1
    for label, target, colour in (
        ("its label is 1", 1, "#00796b"),
        ("its label is 0", 0, "#c2571a"),
    ):
        seen = [
            found["train"](x, np.r_[target, y[1:]], seed).reshape(found["STEPS"], -1)[:, 0].sum()
            for seed in range(2000)
        ]
        axes.hist(seen, 40, alpha=0.6, color=colour, label=f"one record is replaced: {label}")
    axes.set(
        xlabel="what the attacker adds up from all that leaves",
        ylabel="runs",
        title="Sound code at epsilon 2: hard to tell apart",
    )
    axes.legend(frameon=False, fontsize=8)


PICTURES = {
    f.__name__: f
    for f in (
        demo,
        risk_score,
        hazard_ratios,
        own_loss,
        images_over_the_network,
        certify_own_function,
    )
}


def draw(name: str, folder: Path) -> Path:
    found = runpy.run_path(str(DOCS.parent / f"examples/{name}.py"))
    with small_picture(path := folder / f"{name}.svg") as axes:
        PICTURES[name](axes, found)
    return path


if __name__ == "__main__":
    (DOCS / "gallery").mkdir(exist_ok=True)
    for wanted in sys.argv[1:] or PICTURES:
        print(draw(wanted, DOCS / "gallery"))
