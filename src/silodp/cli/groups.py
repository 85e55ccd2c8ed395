"""Groups of commands, such as `silodp federation run`: which commands there are, with their lines
of help. A command's module loads when the command runs.
"""

from __future__ import annotations

from silodp.cli.console import Listed, lazy_group

HERE = "On this machine"
TRAIN = "Train and measure"
MEMBERS = "Members"
LOOK = "Look"
CARE = "Care"
MOVE = "Backups and moves"
COMMANDS = "Commands"

stats = lazy_group(
    "Print figures about the silos' records, or about a run's model.",
    Listed(
        COMMANDS, "score", "profile", "Means, ranges and class counts of the silos, at a price."
    ),
    Listed(COMMANDS, "score", "survival", "A Kaplan-Meier curve over the silos, at a price."),
    Listed(COMMANDS, "use", "estimate", "Coefficients with intervals of a one-shot run, free."),
)

export = lazy_group(
    "Write a run's model, model card or signed archive for others.",
    Listed(COMMANDS, "use:export_model", "model", "A trained model for ONNX, torch or sklearn."),
    Listed(COMMANDS, "use", "card", "A model card: use, price of each silo, how good it is."),
    Listed(COMMANDS, "evidence", "evidence", "One signed archive about a run, and its check."),
)

federation = lazy_group(
    "Silos as processes of their own: start them, train over them, stop them.",
    Listed(HERE, "federation", "up", "Make and start gates, couriers and server here."),
    Listed(HERE, "federation", "status", "Show what runs, and what is left of the budgets."),
    Listed(HERE, "federation", "down", "Stop every process; ledgers, keys and runs stay."),
    Listed(TRAIN, "federation_propose", "propose", "Write a study down for silos to approve."),
    Listed(TRAIN, "federation_run", "run", "Train over the silos, here or elsewhere."),
    Listed(TRAIN, "score:federation_evaluate", "evaluate", "Score a run's model, at a price."),
    Listed(
        TRAIN, "score:federation_profile", "profile", "Means, ranges and class counts, at a price."
    ),
    Listed(TRAIN, "score:federation_survival", "survival", "A Kaplan-Meier curve, at a price."),
    Listed(MEMBERS, "federation", "key", "Make the server's key, which signs its queries."),
    Listed(MEMBERS, "federation_members", "add", "Let a silo in, at the server's engine."),
    Listed(MEMBERS, "federation_members", "remove", "Shut a silo out, at the server's engine."),
    Listed(MEMBERS, "federation_members", "renew", "Make new certificates before the old expire."),
    Listed(
        MEMBERS,
        "federation_members:show_certificates",
        "certificates",
        "Show every certificate, and which expire soon.",
    ),
    Listed(MEMBERS, "shuffler", "shuffler", "The shuffler: adds the silos' counts, sends totals."),
)

ledger = lazy_group(
    "The budget of a data set: what was asked, what it cost, what is left.",
    Listed(LOOK, "ledger:show_ledger", "show", "Show who asked what, its cost, and what is left."),
    Listed(LOOK, "ledger", "verify", "Check the whole ledger: hashes, prices, totals, anchor."),
    Listed(LOOK, "ledger", "export", "Write all entries with their hashes, for an auditor."),
    Listed(LOOK, "metrics", "metrics", "Serve the daemons' counts and health to Prometheus."),
    Listed(CARE, "ledger", "create", "Make the ledger of a data set, once."),
    Listed(CARE, "ledger", "release", "Release what is reserved for runs."),
    Listed(CARE, "ledger_care", "witness", "Appoint a witness, which keeps count and head too."),
    Listed(CARE, "ledger_care", "head", "Sign count and head, for other silos to co-sign."),
    Listed(
        CARE,
        "ledger_care:cosign_head",
        "cosign",
        "Co-sign another silo's head, unless it went back.",
    ),
    Listed(CARE, "ledger_care", "fsck", "List all that is wrong with a ledger and its copies."),
    Listed(MOVE, "ledger_care", "backup", "Copy the ledger whole, while its gate runs or not."),
    Listed(MOVE, "ledger_care", "restore", "Put a backup in the ledger's place."),
    Listed(MOVE, "ledger_care", "confirm", "Ask the witness of a restored ledger again."),
    Listed(MOVE, "ledger_care", "write-off", "Write off all that is left of the budget."),
    Listed(MOVE, "ledger_care", "expect", "On the new machine: make the arrival key."),
    Listed(MOVE, "ledger_care", "bury", "On the old machine: end the ledger for good."),
    Listed(MOVE, "ledger_care", "arrive", "On the new machine: continue the ledger."),
)
