"""What exact noise costs: microseconds per coordinate, on one core, of silodp's rounded Gaussian,
OpenDP's discrete Gaussian, torch.randn.

    OMP_NUM_THREADS=1 taskset -c 0 python -m benchmarks.noise

The ratio is to silodp. torch.randn is float noise from a seeded generator: fast, and neither exact
nor secret. OpenDP is timed through its Python interface, as a user would call it, once per row; the
others take the best of five.
"""

import time
from collections.abc import Callable

import torch
from opendp.domains import atom_domain, vector_domain
from opendp.measurements import make_gaussian
from opendp.metrics import l2_distance
from opendp.mod import enable_features

from silodp.silo.answer.lattice import rounded_gaussian


def opendp_gaussian(scale: float, size: int) -> None:
    make_gaussian(vector_domain(atom_domain(T="i64")), l2_distance(T=float), scale=scale)(
        [0] * size
    )


def seconds(draw: Callable[[float, int], object], scale: float, size: int, repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        draw(scale, size)
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    torch.set_num_threads(1)
    enable_features("contrib")
    samplers = [
        ("silodp lattice", rounded_gaussian, 5),
        ("OpenDP", opendp_gaussian, 1),
        ("torch.randn", lambda scale, size: torch.randn(size) * scale, 5),
    ]
    print(f"{'sampler':16}{'scale':>10}{'size':>12}{'us/coordinate':>16}{'ratio':>10}")
    for scale in (64.0, 2.0**20):
        for size in (62_006, 1_000_000):
            ours = None
            for name, draw, repeats in samplers:
                each = seconds(draw, scale, size, repeats) / size * 1e6
                ours = ours or each
                print(
                    f"{name:16}{scale:10.0f}{size:12,}{each:16.4f}{each / ours:10.2f}", flush=True
                )


if __name__ == "__main__":
    main()
