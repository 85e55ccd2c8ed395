"""Difference clipping: the sensitivity of a gradient difference follows the public move of w, with no assumption on the loss."""

import torch
from torch import Tensor

from silodp.core.mechanisms import Gaussian
from silodp.core.numbers import Number
from silodp.core.query import Query
from silodp.core.statistics import GradDiff


def ask_difference(w: Tensor, reference: Tensor, refine: Gaussian, anchor: Gaussian, slope: Number) -> Query:
    """The query for grad(w) - grad(reference), each record's difference clipped to C = min(2 L, slope ||w - reference||).

    L is the anchor's clip; slope = inf leaves 2 L, as long as a difference of two clipped gradients can be.
    """
    move = torch.linalg.vector_norm(w - reference, dim=-1, keepdim=True)
    reach = torch.nan_to_num(slope * move, nan=torch.inf)
    return Query(GradDiff(w, reference), refine.clipped(torch.minimum(reach, 2 * torch.as_tensor(anchor.clip, dtype=reach.dtype))))
