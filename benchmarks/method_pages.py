"""Write the outputs of commands into docs/methods: run each `sh` block that has a `text` block.

    python benchmarks/method_pages.py            # all pages
    python benchmarks/method_pages.py averaging  # one page

Of the summary that a run prints, the accuracies and the bytes are shown.
`tests/repository/test_docs.py` sees that the numbers are still near.
"""

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

PAGES = Path(__file__).parent.parent / "docs" / "methods"
PAIR = re.compile(
    r"^```sh\n(fedbayes run [^\n]*)\n```\n\n```text\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
SHOWN = re.compile(r"^((?:global|local) accuracy|bytes down / up) +.*?(?= *$)", re.MULTILINE)


def shown(printed: str) -> str:
    """The lines of a run's summary that pages show."""
    return "".join(f"{line[0].rstrip()}\n" for line in SHOWN.finditer(printed))


def run(line: str) -> str:
    """What a command prints, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(line)],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    return done.stdout


def main() -> None:
    for page in sorted(PAGES.glob("*.md")):
        if sys.argv[1:] and page.stem not in sys.argv[1:]:
            continue
        text = page.read_text()
        page.write_text(
            PAIR.sub(
                lambda m: m[0].replace(f"```text\n{m[2]}", f"```text\n{shown(run(m[1]))}"), text
            )
        )


if __name__ == "__main__":
    main()
