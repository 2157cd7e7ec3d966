"""What a process elsewhere is asked of clients, and what it answers: JSON and bytes."""

import traceback
from typing import Any

from fedbayes import errors
from fedbayes.core.messages import encode
from fedbayes.errors import EngineError
from fedbayes.federation.client_runtime import ClientResult, ClientRuntime, Evaluation, Task

Header = dict[str, Any]
"""What JSON can hold."""


def question(item: Task | Evaluation) -> tuple[Header, list[bytes]]:
    """A task or an evaluation, as a header and bytes, of which the first are what several share."""
    if isinstance(item, Task):
        header = {
            "kind": "train",
            "client": item.client,
            "round": item.round,
            "joined": item.state is not None,
            "constants": item.constants,
        }
        return header, [item.message, item.state or b""]
    header = {
        "kind": "evaluate",
        "start": item.start,
        "stop": item.stop,
        "measures": item.measures,
        "temperature": item.temperature,
    }
    return header, [item.model]


def described(item: Task | Evaluation) -> str:
    """What it is about, in words."""
    if isinstance(item, Task):
        return f"client {item.client} in round {item.round}"
    return "the evaluation"


def handle(
    runtime: ClientRuntime, header: Header, blobs: list[bytes]
) -> tuple[Header, list[bytes]]:
    """Do what a question asks for."""
    if header["kind"] == "train":
        state = blobs[1] if header["joined"] else None
        place = header["client"], header["round"]
        outcome = runtime.train(Task(*place, blobs[0], state, header["constants"]))
        reply = {"info": outcome.info, "scores": outcome.scores}
        return reply, [outcome.report, outcome.state]
    rows = header["start"], header["stop"]
    asked = Evaluation(blobs[0], *rows, tuple(header["measures"]), header["temperature"])
    result = runtime.evaluate(asked)
    return {}, [encode(dict(result))]


def outcome(reply: Header, blobs: list[bytes]) -> ClientResult:
    """What came of a task, from its answer."""
    return ClientResult(blobs[0], blobs[1], reply["info"], reply["scores"])


def failure(error: Exception) -> Header:
    """Return the answer to a question that failed: the error, by its name if a user can fix it."""
    known = isinstance(error, errors.FedbayesError)
    return {
        "error": type(error).__name__ if known else "",
        "text": str(error) if known else traceback.format_exc(),
    }


def require_answer(reply: Header, where: str = "") -> None:
    """Raise what a client's side raised, after `where` it was, if its reply is of a failure."""
    if "error" not in reply:
        return
    if reply["error"]:
        raise getattr(errors, reply["error"])(f"{where}{reply['text']}")
    raise EngineError(f"{where}a client's work failed:\n{reply['text']}")
