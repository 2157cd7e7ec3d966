"""Documentation, help texts, settings, docstrings and messages are plain English.

`python -m tests.language docs` lists what a page breaks, with what to write instead.
"""

import pytest

from tests.language import (
    LONGEST,
    ROOT,
    Prose,
    findings,
    in_docs,
    in_interface,
    in_package,
    messages,
    prose_of,
)


def test_help_texts_and_settings_are_plain_english():
    found = in_interface()
    assert not found, "\n".join(map(str, found))


def test_docstrings_and_messages_are_plain_english():
    found = in_package()
    assert not found, "\n".join(map(str, found))


def test_pages_are_plain_english():
    found = in_docs()
    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize(
    "text",
    [
        "The server averages in place of each client.",
        "It stands beside the mean loss.",
        "This is refused.",
        "Mend the file.",
        "Nothing is said of it.",
        "Clients go on with the run, one after the other.",
        f"It is a sentence of {'very ' * LONGEST}many words.",
    ],
)
def test_what_we_do_not_write_is_found(text):
    assert list(findings(Prose("here", text)))


@pytest.mark.parametrize(
    "text",
    [
        "Besides, the server rejects the update.",
        "The option `--hostile` has a new name.",
        "The refuse-free and aforesaid amendment is recommended.",
        "Run it. " * LONGEST,
        "- a list of items\n- each of which is short\n" * LONGEST,
        "The data are so many that the list is long.",
    ],
)
def test_correct_english_is_not_found(text):
    assert not list(findings(Prose("here", text)))


def test_only_prose_of_a_page_is_read():
    text = (
        "# Title\n\nWords.\n\n```python\nx beside y\n```\n\n    code beside code\n\n"
        "| beside |\n|---|\n\n<!-- beside -->\nA [link](beside.md).\n"
    )
    assert "beside" not in prose_of(text)
    assert "Words." in prose_of(text)
    assert prose_of(text).count("\n") == text.count("\n")


def test_messages_are_read_without_their_values():
    file = ROOT / "src" / "fedbayes" / "errors.py"
    assert " (did you mean x?)" in [one.text for one in messages([file])]
    found = [one.text for one in messages([ROOT / "src" / "fedbayes" / "cli" / "calibrate.py"])]
    assert "--method x: choose x" in found
