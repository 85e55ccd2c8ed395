"""The command line."""

from silodp.host.python_path import leave_out_current_folder

leave_out_current_folder()  # before any library is imported
