"""The wire over Flower."""

from silodp.host.python_path import leave_out_current_folder

# A file in the current folder must not replace a library, so this comes before their import.
leave_out_current_folder()
