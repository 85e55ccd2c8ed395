"""APPFL 1.12.0, VanillaTrainer: `silodp audit certify examples/certify/appfl.py:laplace --epsilon
1`, or `:gaussian`.

The claim: "Differential privacy for output perturbation based on Laplacian distribution ... :param
epsilon: privacy budget" (privacy/dp.py), with "1-norm for privacy guarantees to be meaningful" (its
documentation). A record is replaced; one client's model after one round is what is sent. Needs: pip
install --no-deps appfl==1.12.0 omegaconf antlr4-python3-runtime==4.9.3 opacus opt_einsum; wandb is
not used and stands empty here.
"""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import torch

sys.modules.setdefault("wandb", ModuleType("wandb"))
from appfl.algorithm.trainer.vanilla_trainer import VanillaTrainer  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402

# as in its documentation, but for 20 steps in place of 100, and SGD, on which clipping has more of
# a grip than on Adam
CONFIG = {
    "mode": "step",
    "num_local_steps": 20,
    "optim": "SGD",
    "optim_args": {"lr": 0.001},
    "train_batch_size": 64,
    "use_dp": True,
    "epsilon": 1.0,
    "clip_grad": True,
    "clip_value": 1.0,
    "clip_norm": 1,
    "device": "cpu",
    "logging_output_dirname": ".",
    "logging_output_filename": "none",
}
QUIET = SimpleNamespace(
    **{name: lambda *words: None for name in ("info", "log_title", "set_title", "log_content")}
)


def trained(x: np.ndarray, y: np.ndarray, seed: int, mechanism: str, order: int) -> np.ndarray:
    torch.manual_seed(seed)
    model = torch.nn.Linear(x.shape[1], 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    data = torch.utils.data.TensorDataset(torch.tensor(x).float(), torch.tensor(y).float()[:, None])
    config = OmegaConf.create(CONFIG | {"dp_mechanism": mechanism, "clip_norm": order})
    trainer = VanillaTrainer(
        model=model,
        loss_fn=torch.nn.BCEWithLogitsLoss(),
        metric=lambda true, said: 0.0,
        train_dataset=data,
        train_configs=config,
        logger=QUIET,
        client_id="1",
    )
    trainer.train()
    return np.concatenate([value.numpy().ravel() for value in trainer.model_state.values()])


def laplace(x, y, seed):
    return trained(x, y, seed, "laplace", 1)


def gaussian(x, y, seed):
    return trained(x, y, seed, "gaussian", 2)
