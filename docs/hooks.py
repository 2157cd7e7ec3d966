"""What MkDocs does with every page: mathematics to MathML, tables of parameters from the code.

Formulas are written as GitHub shows them too: $`inline`$ and fences named `math`. MathML needs no
script and no network. `<!-- parameters: NAME -->` becomes the table of a method's parameters.
"""

import re
from typing import Any

from latex2mathml.converter import convert

from fedbayes.methods import METHODS

_BLOCK = re.compile(r"^```math\n(.*?)\n```$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"\$`(.+?)`\$", re.DOTALL)
_PARAMETERS = re.compile(r"<!-- parameters: (\S+) -->")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page as MkDocs shall read it."""
    markdown = _BLOCK.sub(lambda found: convert(found[1].strip(), display="block"), markdown)
    # A line that begins with <math> would be taken for a block.
    markdown = _INLINE.sub(lambda found: f"<span>{convert(found[1])}</span>", markdown)
    return _PARAMETERS.sub(lambda found: parameters(found[1]), markdown)


def parameters(name: str) -> str:
    """The parameters of a method as a Markdown table."""
    method = METHODS[name]
    lines = [f"Parameters of `{name}`, in the table `[method]`:", ""]
    if not method.model_fields:
        return f"`{name}` has no parameters."
    lines += ["| parameter | default | |", "|---|---|---|"]
    for key, field in method.model_fields.items():
        default = "none" if field.default is None else field.default
        default = f"{default:.4g}" if isinstance(default, float) else default
        about = (field.description or "").replace("|", "\\|")
        lines.append(f"| `{key}` | `{default}` | {about} |")
    return "\n".join(lines)
