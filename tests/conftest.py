"""Tests run one thread each: the suite itself is spread over the cores."""

import os

import torch

os.environ["COLUMNS"] = "200"  # tables are read by tests at one width, whatever the terminal

torch.set_num_threads(1)
