"""FLamby 0.0.1 (commit edacf54d), FedAvg with `dp_target_epsilon`: `silodp audit certify
examples/certify/flamby.py:heart --epsilon 1 --delta 1e-4 --records 30 --features 13`.

The claim: "dp_target_epsilon: The target epsilon for (epsilon, delta)-differential private
guarantee" (strategies/fed_avg.py). Settings are those of dp_example/
create_fed_heart_disease_dp_results.py: 15 rounds of 100 updates, batches of 4. The table is as
large as its smallest hospital, and the model that leaves it is what is sent. Needs: pip install
--no-deps git+https://github.com/owkin/FLamby@edacf54d opacus opt_einsum tqdm; tensorboard is not
used and stands empty here.
"""

import sys
from types import ModuleType

import numpy as np
import torch

sys.modules.setdefault("torch.utils.tensorboard", ModuleType("torch.utils.tensorboard"))
sys.modules["torch.utils.tensorboard"].SummaryWriter = None
from flamby.strategies import FedAvg, fed_avg  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

fed_avg.tqdm = iter  # no bar for the rounds of each run
CLAIM = {"dp_target_epsilon": 1.0, "dp_target_delta": 1e-4, "dp_max_grad_norm": 1.1}
torch.set_num_threads(1)


def heart(x, y, seed):
    """Return the model of one hospital after all rounds."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(x.shape[1], 1), torch.nn.Sigmoid())
    torch.nn.init.zeros_(model[0].weight)
    torch.nn.init.zeros_(model[0].bias)
    rows = TensorDataset(torch.tensor(x).float(), torch.tensor(y).float()[:, None])
    strategy = FedAvg(
        training_dataloaders=[DataLoader(rows, batch_size=4, shuffle=True)],
        model=model,
        loss=torch.nn.BCELoss(),
        optimizer_class=torch.optim.SGD,
        learning_rate=0.001,
        num_updates=100,
        nrounds=15,
        seed=seed % 2**31,
        **CLAIM,
    )
    trained = strategy.run()[0]
    return np.concatenate([value.detach().numpy().ravel() for value in trained.parameters()])
