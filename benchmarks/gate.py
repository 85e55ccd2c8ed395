"""A deployed gate's whole answer about all records of a silo, beside Opacus's clipped and noised
mean gradient of the same records.

    python -m benchmarks.gate                        the ratios, with the bounds that they must keep
    python -m benchmarks.gate --large 50000          one answer of 11 million parameters about so
    many images, on a GPU where there is one

An answer is gradients, clip, exact integer sum, exact noise and the signed reply. Opacus runs its
two fast modes, hooks and ghost, in float32 with noise of torch.randn, in physical batches that fit
its memory. Poisson batches cost a gate a full pass, as its proof asks.
"""

from __future__ import annotations

import argparse
import copy
import resource
import time

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor, nn

from benchmarks.gradient import CLIP, Client, ghost, hooks
from benchmarks.models import cnn, images, mlp, small_vgg, vectors, vgg
from benchmarks.table import HEAD, Method, Row, build, compare
from silodp.core.mechanisms import Gaussian
from silodp.core.problem.losses import cross_entropy
from silodp.core.problem.problem import Problem
from silodp.core.protocol.codec import Answer, encode_reply
from silodp.core.query import Query
from silodp.core.sampling import FullBatch, Poisson, Sampling
from silodp.core.statistics import Grad, GradDiff
from silodp.silo.answer.exact import Exact
from silodp.silo.answer.integers import lattice_step
from silodp.silo.data.records import Records

# model, records, how many, how many in a physical batch of Opacus, and how many times Opacus's
# fastest mode a gate may take
WORKS = {
    "MLP 50-64-2, 3,394 parameters, 4,000 records": (mlp, vectors, 4000, 4000, 1.5),
    "LeNet, 62,006 parameters, 1,024 records": (cnn, images, 1024, 256, 1.5),
    "small VGG, 937,448 parameters, 256 records": (small_vgg, images, 256, 64, 2.5),
    "VGG-11, 10,991,230 parameters, 64 records": (vgg, images, 64, 16, 2.5),
}
GRADIENT, DIFFERENCE, POISSON = (
    "gate, gradient",
    "gate, difference of gradients",
    "gate, Poisson batch of a tenth",
)
MOST_OF_A_GRADIENT = 2.5


class Silo:
    """A gate's answerer over records, without policy and ledger, and its signature."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        self.problem, self.n, self._key = (
            Problem(model, cross_entropy),
            len(y),
            Ed25519PrivateKey.generate(),
        )
        self.exact = Exact(
            self.problem, Records.of([(x, y)]), partition=lambda name, batches: np.arange(len(y))
        )
        self.w = torch.cat([p.detach().flatten() for p in model.parameters()])[None]
        self.other = self.w + 0.01 * torch.randn_like(self.w)

    def reply(self, sampling: Sampling = FullBatch(), *, difference: bool = False) -> bytes:  # noqa: B008
        query = Query(
            GradDiff(self.w, self.other) if difference else Grad(self.w),
            Gaussian("minibatch", CLIP, 1.0, sampling),
        )
        value = self.exact.answer(query, [0])
        return encode_reply(
            Answer(
                "silo",
                "query",
                "0" * 64,
                value[0],
                query.event(),
                1,
                "0" * 64,
                self.exact.packing(query),
            ),
            self._key,
        )

    def direction(self) -> Tensor:
        """Of the sum without noise."""
        total = self.exact._sum(
            self.exact._gradients([self.w]),
            np.arange(self.n),
            CLIP,
            lattice_step(CLIP, self.problem.dim),
            self.problem.dim,
        )
        return torch.from_numpy(total.astype(np.float64)) / np.linalg.norm(total.astype(np.float64))


def rows(repeat: int) -> list[Row]:
    found = []
    for work, (model, data, records, batch, most) in WORKS.items():
        torch.manual_seed(0)
        made = model()
        x, y = (part[0] for part in data(1, records))
        silo = Silo(made, x, y)

        def opacus(
            client: Client, x: Tensor = x, y: Tensor = y, batch: int = batch, silo: Silo = silo
        ) -> Method:
            def total() -> Tensor:
                parts = zip(x.split(batch), y.split(batch), strict=True)
                return torch.stack([client(*part) for part in parts]).sum(0)

            def check() -> tuple[Tensor, Tensor]:
                return total().double() / total().double().norm(), silo.direction()

            return Method(lambda: total() + torch.randn(silo.problem.dim), check)

        def gate(sampling: Sampling = FullBatch(), silo: Silo = silo, **more: bool) -> Method:  # noqa: B008
            return Method(
                lambda: silo.reply(sampling, **more), lambda: (silo.direction(), silo.direction())
            )

        own = {GRADIENT: gate(), DIFFERENCE: gate(difference=True), POISSON: gate(Poisson(0.1))}
        peers = {
            f"Opacus hooks, batches of {batch}": lambda made=made: opacus(
                hooks(copy.deepcopy(made))
            ),
            f"Opacus ghost, batches of {batch}": lambda made=made: opacus(
                ghost(copy.deepcopy(made))
            ),
        }
        taken = compare("gate", work, own | build(peers), repeat)
        found += taken
        _judge(taken, most)
    return found


def _judge(taken: list[Row], most: float) -> None:
    medians = {row.method: row.median_ms for row in taken}
    apart = medians[DIFFERENCE] / medians[GRADIENT]
    print(
        f"{'':10}a difference takes {apart:.2f} times a "
        f"gradient{_beyond(apart, MOST_OF_A_GRADIENT)}"
    )
    if peers := [ms for method, ms in medians.items() if method.startswith("Opacus")]:
        ratio = medians[GRADIENT] / min(peers)
        print(
            (
                f"{'':10}a gradient takes {ratio:.2f} times Opacus's fastest "
                f"mode{_beyond(ratio, most)}"
            ),
            flush=True,
        )


def _beyond(ratio: float, most: float) -> str:
    return f" (at most {most:g})" if ratio <= most else f": MORE THAN {most:g}"


def large(records: int) -> None:
    """One whole answer about made-up images of 32 x 32 x 3, and what it takes."""
    torch.manual_seed(0)
    x, y = (part[0] for part in images(1, records))
    silo = Silo(vgg(), x, y)
    products = silo.exact._products
    assert products is not None
    start = time.perf_counter()
    silo.exact.verify()
    print(
        (
            f"device {products.device}, {products.chunk} records in a chunk, tested itself in "
            f"{time.perf_counter() - start:.1f} s"
        ),
        flush=True,
    )
    for name, more in ((GRADIENT, {}), (DIFFERENCE, {"difference": True})):
        start = time.perf_counter()
        length = len(silo.reply(**more))
        print(
            (
                f"{name}: {silo.problem.dim:,} parameters, {records:,} records: "
                f"{time.perf_counter() - start:.1f} s, {length:,} bytes"
            ),
            flush=True,
        )
    print(
        "memory of the process at most "
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5, help="repeats of an answer")
    parser.add_argument(
        "--large",
        type=int,
        metavar="RECORDS",
        help="one answer of 11 million parameters about so many images, and nothing else",
    )
    options = parser.parse_args()
    if options.large:
        large(options.large)
    else:
        print(HEAD, flush=True)
        rows(options.repeat)


if __name__ == "__main__":
    main()
