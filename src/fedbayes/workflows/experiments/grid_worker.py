"""A process that does jobs of a grid.

    python -m fedbayes.workflows.experiments.grid_worker

A frame of its input is a job; frames of its output say how far that is (`worker.write`). It ends
when its input does, also in the middle of a run, so it never outlives the process that started it;
the run goes on from its last complete round another time.
"""

import os
import threading
import warnings
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from fedbayes.errors import FedbayesError, FedbayesWarning
from fedbayes.federation.engines.questions import Header
from fedbayes.federation.engines.worker import pipes, read, write
from fedbayes.workflows.experiments.grid import GridJob


def in_words(error: Exception) -> str:
    """What stopped a run; of what is no user's mistake, where in the code it was."""
    if isinstance(error, FedbayesError):
        return str(error)
    if isinstance(error, OSError) and error.filename:  # such as a full disk
        return f"{error.filename}: {error.strerror}. Run the same command again to resume"
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = ""
    if trace is not None:
        where = f" ({Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})"
    return f"{type(error).__name__}: {error}{where}"


def main() -> None:
    """Do jobs until the input ends."""
    requests, replies = pipes()
    asked: SimpleQueue[Header] = SimpleQueue()

    def listen() -> None:
        with suppress(EOFError):
            while True:
                asked.put(read(requests)[0])
        os._exit(0)

    def say(**words: Any) -> None:
        write(replies, words)

    def shown(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, FedbayesWarning):
            say(note=str(message))

    warnings.simplefilter("always", FedbayesWarning)
    warnings.showwarning = shown
    threading.Thread(target=listen, daemon=True).start()
    while True:
        words = asked.get()
        try:
            job = GridJob.unpacked(words["job"])
            job.run(words["track"], lambda number, rounds: say(round=number, rounds=rounds))
            say(trouble="")
        except Exception as error:
            say(trouble=in_words(error))


if __name__ == "__main__":
    main()
