"""Engines for a GPU, in Triton and CUDA. Studies give ENGINES to the simulation."""

from research.kernels.gpu import Gpu
from research.kernels.pictures import Pictures
from silodp.engine.clipping import IN_TORCH
from silodp.engine.native import Native
from silodp.engine.task import Engine

ENGINES: tuple[Engine, ...] = (Native(), Gpu(), Pictures(), *IN_TORCH)
"""The engines of the wheel with those of this folder, the fastest first: `gpu` knows one hidden
layer, `pictures` small convolutional networks. On a CPU they choose as the wheel does.
"""
