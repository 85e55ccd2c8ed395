"""Kernels in CUDA, compiled by torch for the sizes at hand when they are first needed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def compiler() -> Any:
    """torch's compiler for CUDA while a program runs; older ones have none, and then something else
    does the work.
    """
    if torch.version.hip:
        return None
    return getattr(torch.cuda, "_compile_kernel", None)


def kernels(source: Path, names: tuple[str, ...], sizes: Mapping[str, object]) -> list[Any]:
    """The named kernels of a file, in which each size has its name."""
    values = "".join(f"#define {name} {value}\n" for name, value in sizes.items())
    return [compiler()(values + source.read_text(), name) for name in names]
