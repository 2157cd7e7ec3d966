"""Tests; their folders mirror those of the package, and what they share is in `tests.helpers`."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
"""The repository."""
DOCS = ROOT / "docs"
