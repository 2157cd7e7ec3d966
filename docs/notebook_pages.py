"""What MkDocs does with notebooks: a page of each, with the outputs that are stored in it.

They are plain JSON, so nothing has to be installed and nothing is executed; `make notebooks`
executes them, and `tests/repository/test_notebooks.py` sees that the outputs are still
true. The notebook itself is a file to download.
"""

import json
import re
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

_LINK = re.compile(r"\]\(([\w/.-]+)\.ipynb\)(?!\{)")
_STYLE = re.compile(r"<style.*?</style>", re.DOTALL)
_PICTURE = re.compile(r"(!\[[^]]*\]\(\S+)-light\.svg\)")
_TABLE = re.compile(r'<table border="1" class="dataframe">')


@event_priority(100)  # before the plugin that looks for the targets of redirects
def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add the pages of notebooks."""
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            name = f"{file.src_uri.removesuffix('.ipynb')}.md"
            path = Path(config.docs_dir) / file.src_uri
            files.append(File.generated(config, name, content=page(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to notebooks lead to their pages, but for those to download them."""
    return _LINK.sub(r"](\1.md)", markdown)


def page(path: Path) -> str:
    """A notebook as Markdown."""
    parts = [part for cell in json.loads(path.read_text())["cells"] for part in _parts(cell)]
    title, *rest = parts[0].split("\n", 1)
    download = f"[Download this notebook]({path.name}){{ download }}"
    return "\n\n".join([title, download, *rest, *parts[1:]])


def _parts(cell: dict[str, Any]) -> list[str]:
    """A cell and its outputs, each as Markdown."""
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":  # which shows in Jupyter one picture for both themes
        return [_PICTURE.sub(r"\1-light.svg#only-light)\n\1-dark.svg#only-dark)", text)]
    return [f"```python\n{text}\n```", *map(_output, cell["outputs"])]


def _output(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return f"```text\n{''.join(output['text'])}\n```"
    data = {kind: "".join(value) for kind, value in output["data"].items()}
    if "image/png" in data:
        source = f"data:image/png;base64,{data['image/png'].replace(chr(10), '')}"
        return f'<p><img alt="{escape(data["text/plain"])}" src="{source}"></p>'
    if "text/html" in data:
        html = _TABLE.sub("<table>", _STYLE.sub("", data["text/html"]))
        # A blank line would end the block.
        return "\n".join(line.strip() for line in html.splitlines() if line.strip())
    return f"```text\n{data['text/plain']}\n```"
