"""Difference clipping: the sensitivity of a gradient difference follows the public move of w, with
no assumption on the loss.
"""

import torch

from silodp.core.errors import BadInput
from silodp.server.algorithms.language import (
    Annotated,
    ClippedDiff,
    Gaussian,
    GradDiff,
    Number,
    Query,
    Setting,
    Tensor,
)

FORMS = ("move", "each", "both")
Form = Annotated[
    str,
    Setting(
        "move",
        type=str,
        help=(
            "How differences are clipped: move (the difference, at slope x the move of w), "
            "each (both gradients to L first, "
            "as the paper's authors do) or both."
        ),
    ),
]


def ask_difference(
    w: Tensor,
    reference: Tensor,
    refine: Gaussian,
    anchor: Gaussian,
    slope: Number,
    form: str = "move",
) -> Query:
    """The query for grad(w) - grad(reference), each record's difference clipped to C = min(2 L,
    slope ||w - reference||).

    L is the anchor's clip; slope = inf leaves 2 L, as long as a difference of two clipped gradients
    can be. The form "each" clips both gradients to L and subtracts, so that sums telescope, and C
    is 2 L whatever the slope; "both" clips what it gives at C too. A record that is replaced moves
    the sum by 2 C in every form, which is what the noise is for.
    """
    if form not in FORMS:
        raise BadInput(f"form is {form!r}; choose one of {', '.join(FORMS)}")
    most = 2 * torch.as_tensor(anchor.clip, dtype=w.dtype)
    if form == "each":
        return Query(ClippedDiff(w, reference, anchor.clip), refine.clipped(most))
    move = torch.linalg.vector_norm(w - reference, dim=-1, keepdim=True)
    clip = torch.minimum(torch.nan_to_num(slope * move, nan=torch.inf), most)
    return Query(
        ClippedDiff(w, reference, anchor.clip) if form == "both" else GradDiff(w, reference),
        refine.clipped(clip),
    )
