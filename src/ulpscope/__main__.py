"""`python -m ulpscope`."""

from ulpscope.cli.main import main

main()
