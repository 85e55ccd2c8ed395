"""Difference clipping. The sensitivity of a gradient difference follows from the public move of w,
without an assumption on the loss.
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
    """Return the query for grad(w) - grad(reference), with each record's difference clipped.

    The clip is C = min(2 L, slope ||w - reference||), where L is the anchor's clip. With slope =
    inf it is 2 L, the greatest length of a difference of two clipped gradients.

    In every form one replaced record changes the sum by at most 2 C. The noise is set for this
    change.

    Arguments:

    - `w`, `reference`: the two points (J, d).
    - `refine`: the mechanism of the difference. The query uses it with the clip C.
    - `anchor`: the mechanism of the gradients. Its clip is L.
    - `slope`: clip of a difference for each unit that w moves. inf leaves the cap 2 L alone.
    - `form` (default "move"): "move" clips the difference at C. "each" clips both gradients at L
      and subtracts them, so that sums telescope; C is 2 L for every slope. "both" clips the result
      of "each" at C too.

    Raise BadInput if the form is unknown.
    """
    if form not in FORMS:
        raise BadInput(f"form is {form!r}; choose one of {', '.join(FORMS)}")
    most = 2 * torch.as_tensor(anchor.clip, dtype=w.dtype)
    if form == "each":
        return Query(ClippedDiff(w, reference, anchor.clip), refine.clipped(most))
    move = torch.linalg.vector_norm(w - reference, dim=-1, keepdim=True)
    clip = torch.minimum(torch.nan_to_num(slope * move, nan=torch.inf), most)
    if form == "both":
        return Query(ClippedDiff(w, reference, anchor.clip), refine.clipped(clip))
    return Query(GradDiff(w, reference), refine.clipped(clip))
