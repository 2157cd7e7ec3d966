"""For all tests."""

import os

# Two test processes share two cores: a BLAS that took both for itself would wait for the other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
