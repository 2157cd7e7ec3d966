"""The notebooks of the documentation run, and what is stored in them is what comes of it."""

import re

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

from tests import DOCS

NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
NOTEBOOKS = sorted((DOCS / "tutorials").glob("*.ipynb"))


def results(cell):
    """What a cell printed and gave, as text; a display that follows a run tells of time."""
    for output in cell.get("outputs", ()):
        if output.output_type == "stream":
            yield output.text
        elif output.output_type == "execute_result":
            yield output.data["text/plain"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_does_what_it_says(path, tmp_path):
    stored = nbformat.read(path, 4)
    nbformat.validate(stored)
    notebook = nbformat.read(path, 4)
    NotebookClient(
        notebook,
        timeout=900,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
        record_timing=False,
    ).execute()
    assert list(tmp_path.iterdir()) == []
    told = 0
    for before, after in zip(stored.cells, notebook.cells, strict=True):
        outputs = after.get("outputs", [])
        assert all(output.get("name") != "stderr" for output in outputs), after.source
        assert len(outputs) == len(before.get("outputs", [])), after.source
        for old, new in zip(results(before), results(after), strict=True):
            assert NUMBER.sub("", old).split() == NUMBER.sub("", new).split(), after.source
            then, now = (np.array(NUMBER.findall(text), float) for text in (old, new))
            np.testing.assert_allclose(now, then, rtol=0.05, atol=0.03, err_msg=after.source)
            told += len(now)
        for output in outputs:
            if "<progress" in output.get("data", {}).get("text/html", ""):  # it followed the run
                assert re.search(r"^round (\d+)/\1 ", output.data["text/plain"], re.MULTILINE)
                assert '<progress value="1.0000"' in output.data["text/html"]
    assert told > 5


def test_the_pages_show_what_is_stored():
    import importlib.util

    spec = importlib.util.spec_from_file_location("notebook_pages", DOCS / "notebook_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for path in (DOCS / "tutorials").glob("*.ipynb"):
        page, notebook = module.page(path), nbformat.read(path, 4)
        assert page.startswith("# ")
        assert f"]({path.name}){{ download }}" in page
        for cell in notebook.cells:
            if cell.cell_type == "code":
                assert f"```python\n{cell.source}\n```" in page
        shown = module.on_page_markdown(page)
        assert f"]({path.name}){{ download }}" in shown
        assert set(re.findall(r"\]\(([\w/.-]+\.ipynb)\)", shown)) == {path.name}
        for block in re.findall(r"^<div>.*?^</div>$", page, re.DOTALL | re.MULTILINE):
            assert "\n\n" not in block
            assert "<style" not in block
        nav = (DOCS.parent / "mkdocs.yml").read_text()
        assert f"tutorials/{path.stem}.md" in nav
