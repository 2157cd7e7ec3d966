"""One self-contained HTML page of a fusion in function space: what was fused, and what came out."""

import json
from base64 import b64encode
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedbayes.data.plot import drawn
from fedbayes.reports.page import environment, stamp
from fedbayes.reports.palette import LIGHT
from fedbayes.runs.readable import number, words
from fedbayes.version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def render(content: Mapping[str, Any], pictures: "Mapping[str, Figure]") -> str:
    """The page of a fusion.

    Args:
        content: what `fedbayes fuse --report` writes as JSON (`tools.fusion_report.report`); the
            page holds it too.
        pictures: `frontier`, and `inputs` where there is a picture of them.
    """
    frontier = content["frontier"]
    known = {"name", "width", "parameters", "multiplications", "divergence", "agreement"}
    return (
        environment()
        .get_template("fusion.html")
        .render(
            of=content,
            classes=content["clients"] and bool(content["with_each_client"][0]["draws_by_class"]),
            metrics=[(key, words(key)) for key in frontier[0] if key not in known],
            sources={
                name: f"data:{kind};base64,{b64encode(drawn(pictures[name], form)).decode()}"
                for name, kind, form in (
                    ("frontier", "image/svg+xml", "svg"),
                    ("inputs", "image/png", "png"),
                )
                if name in pictures
            },
            number=number,
            made=stamp(),
            version=__version__,
            light=LIGHT,
            data=json.loads(json.dumps(content, allow_nan=False)),
        )
    )
