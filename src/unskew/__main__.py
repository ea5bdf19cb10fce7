"""`python -m unskew`: the command where the script is not on the path."""

from unskew.cli import main

main()
