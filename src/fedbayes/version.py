"""The version of the package."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("fedbayes")
except PackageNotFoundError:  # it is not installed, but lies on the path
    __version__ = "0+unknown"
