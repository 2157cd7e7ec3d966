"""Size of an installation and time of imports, as the documentation states them.

    python benchmarks/startup.py

Prints the size of the package and of its environment, and the CPU seconds of `import fedbayes`,
`fedbayes --help` and `import torch`: the least of several processes each.
"""

import resource
import subprocess
import sys
from pathlib import Path

import fedbayes

COMMANDS = {
    "python -c pass": ("-c", "pass"),
    "import fedbayes": ("-c", "import fedbayes"),
    "fedbayes --help": ("-m", "fedbayes", "--help"),
    "fedbayes methods": ("-m", "fedbayes", "methods"),
    "import torch": ("-c", "import torch"),
}
"""What is timed, as arguments of Python."""


def seconds(arguments: tuple[str, ...], times: int = 5) -> float:
    """The least CPU time of a process over several starts; waiting for the disk does not count."""
    found = []
    for _ in range(times):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return min(found)


def size(folder: Path) -> float:
    """MB of the files below a folder, without compiled Python."""
    files = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    return sum(path.stat().st_size for path in files if path.is_file()) / 1e6


if __name__ == "__main__":
    print(f"package      {size(Path(fedbayes.__file__).parent):8.1f} MB")
    print(f"environment  {size(Path(sys.prefix)):8.1f} MB")
    for name, arguments in COMMANDS.items():
        print(f"{name:20} {seconds(arguments):6.2f} s")
