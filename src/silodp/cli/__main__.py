"""`python -m silodp.cli`."""

from silodp.cli.app import main

main()
