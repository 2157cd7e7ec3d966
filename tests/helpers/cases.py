"""Cases of a parametrized test: which of them the default run leaves out."""

import pytest


def cases(values, slow):
    """Parameters, of which those in `slow` are tried when asked; a tuple is one of each name."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=pytest.mark.slow if value in slow else (),
        )
        for value in values
    ]
