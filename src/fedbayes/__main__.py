"""`fedbayes` and `python -m fedbayes`: the command line, which takes a moment to be there."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C before it is there ends like one that comes later."""
    try:
        from fedbayes.cli import main as command
    except KeyboardInterrupt:
        sys.exit(130)
    command()


if __name__ == "__main__":
    main()
