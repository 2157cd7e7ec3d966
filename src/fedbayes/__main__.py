"""`python -m fedbayes`: the command line, where its script is not on the path."""

from fedbayes.cli import main

if __name__ == "__main__":
    main()
