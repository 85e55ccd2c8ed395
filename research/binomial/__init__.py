"""The paper's own shuffle protocol, P_1D and P_vec (Cheu et al. 2021), with binomial noise and its
accountant.

The package has exact totals instead (`silodp.core.mechanisms.totals`), which have less noise at the
same price. This protocol runs in simulation alone: `run.connect` and `run.calibrate`.
"""
