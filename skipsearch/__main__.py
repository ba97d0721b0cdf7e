"""`python -m skipsearch`, for a checkout that is not installed."""

from skipsearch.cli.main import main

main()
