"""PEEKING: research only, never deployed: held-out evaluation, sweeps, figures, audits, conformance
suites.
"""
