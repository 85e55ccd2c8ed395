"""Tests run one thread each: the suite itself is spread over the cores."""

import torch

torch.set_num_threads(1)
