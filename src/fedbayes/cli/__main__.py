"""`python -m fedbayes.cli`."""

from fedbayes.cli import main

main()
