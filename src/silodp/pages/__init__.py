"""Pages about runs: a report to print and sign, and what `silodp ui` shows. Readers of run folders,
which hold releases and never a record.
"""
