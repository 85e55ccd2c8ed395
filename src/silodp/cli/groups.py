"""Groups of commands, such as `silodp federation run`, with their commands' lines of help. A
command's module loads when the command runs.
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
        COMMANDS,
        "score",
        "profile",
        "Show means, ranges and class counts of the silos, at a price.",
    ),
    Listed(COMMANDS, "columns", "table1", "Print Table 1: columns by group, under one price."),
    Listed(
        COMMANDS,
        "columns",
        "quantiles",
        "Show medians, quartiles and means with intervals, at a price.",
    ),
    Listed(
        COMMANDS, "score", "survival", "Estimate a Kaplan-Meier curve over the silos, at a price."
    ),
    Listed(
        COMMANDS,
        "estimates",
        "estimate",
        "Estimate odds, rate or hazard ratios with intervals, at a price.",
    ),
    Listed(COMMANDS, "estimates", "logrank", "Test whether two groups survive alike, at a price."),
    Listed(
        COMMANDS,
        "synthetic",
        "synthesise",
        "Write a synthetic table for any later analysis, at one price.",
    ),
)

export = lazy_group(
    "Write a run's model, model card or signed archive for others.",
    Listed(
        COMMANDS, "use:export_model", "model", "Write a trained model for ONNX, torch or sklearn."
    ),
    Listed(COMMANDS, "use", "card", "Write a model card: use, price of each silo, quality."),
    Listed(COMMANDS, "evidence", "evidence", "Write or verify one signed archive about a run."),
)

federation = lazy_group(
    "Start silos as separate processes, train over them, stop them.",
    Listed(HERE, "federation", "up", "Create and start gates, couriers and server here."),
    Listed(HERE, "federation", "status", "Show processes, connections, and budgets used."),
    Listed(HERE, "federation", "down", "Stop every process. Ledgers, keys and runs remain."),
    Listed(
        TRAIN, "federation_propose", "propose", "Describe a study in a file that silos approve."
    ),
    Listed(TRAIN, "federation_run", "run", "Train over the silos, here or elsewhere."),
    Listed(TRAIN, "score:federation_evaluate", "evaluate", "Score a run's model, at a price."),
    Listed(
        TRAIN,
        "score:federation_profile",
        "profile",
        "Show means, ranges and class counts, at a price.",
    ),
    Listed(
        TRAIN, "columns:federation_table1", "table1", "Print Table 1: every column, at a price."
    ),
    Listed(
        TRAIN,
        "columns:federation_quantiles",
        "quantiles",
        "Show medians and quartiles, at a price.",
    ),
    Listed(
        TRAIN,
        "synthetic:federation_synthesise",
        "synthesise",
        "Write a synthetic table, at a price.",
    ),
    Listed(
        TRAIN, "score:federation_survival", "survival", "Estimate a Kaplan-Meier curve, at a price."
    ),
    Listed(
        TRAIN,
        "estimates:federation_estimate",
        "estimate",
        "Estimate odds, rate or hazard ratios, at a price.",
    ),
    Listed(
        TRAIN,
        "estimates:federation_logrank",
        "logrank",
        "Test whether two groups survive alike, at a price.",
    ),
    Listed(MEMBERS, "federation", "key", "Create the server's key, which signs its queries."),
    Listed(MEMBERS, "federation_members", "add", "Admit a silo at the server's engine."),
    Listed(MEMBERS, "federation_members", "remove", "Exclude a silo at the server's engine."),
    Listed(
        MEMBERS, "federation_members", "renew", "Issue new certificates before the old ones expire."
    ),
    Listed(
        MEMBERS,
        "federation_members:show_certificates",
        "certificates",
        "Show every certificate and its expiry date.",
    ),
    Listed(MEMBERS, "shuffler", "shuffler", "Run a shuffler, which adds the silos' counts."),
)

ledger = lazy_group(
    "Show and manage a data set's budget: queries, prices, and the rest.",
    Listed(
        LOOK,
        "ledger:show_ledger",
        "show",
        "Show each query, its asker and price, and the budget used.",
    ),
    Listed(LOOK, "ledger", "verify", "Check the whole ledger: hashes, prices, totals, anchor."),
    Listed(LOOK, "ledger", "export", "Write all entries with their hashes, for an auditor."),
    Listed(LOOK, "metrics", "metrics", "Serve the daemons' counts and health to Prometheus."),
    Listed(CARE, "ledger", "create", "Create the ledger of a data set, once."),
    Listed(CARE, "ledger", "release", "Release budget that is reserved for runs."),
    Listed(CARE, "ledger_care", "witness", "Appoint a witness, which also records count and head."),
    Listed(CARE, "ledger_care", "head", "Sign count and head, for other silos to co-sign."),
    Listed(
        CARE,
        "ledger_care:cosign_head",
        "cosign",
        "Co-sign another silo's head, unless its ledger was rolled back.",
    ),
    Listed(CARE, "ledger_care", "fsck", "List all faults of a ledger and its copies."),
    Listed(MOVE, "ledger_care", "backup", "Copy the whole ledger, even while its gate runs."),
    Listed(MOVE, "ledger_care", "restore", "Replace the ledger by a backup."),
    Listed(MOVE, "ledger_care", "confirm", "Ask the witness of a restored ledger again."),
    Listed(MOVE, "ledger_care", "write-off", "Write off the rest of the budget."),
    Listed(MOVE, "ledger_care", "expect", "Create the arrival key, on the new machine."),
    Listed(MOVE, "ledger_care", "bury", "End the ledger for good, on the old machine."),
    Listed(MOVE, "ledger_care", "arrive", "Continue the ledger, on the new machine."),
)
