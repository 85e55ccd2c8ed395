"""PEEKING: simulation in one process, for research. It is never deployed. It contains training,
tuning, sweeps, evaluation on test records, and the scikit-learn estimators.
"""
