"""Which methods and settings allow compression."""

import torch

from fedbayes.contracts import AnyMethod, Reports, RoundContext
from fedbayes.core.tensors import Tensors
from fedbayes.errors import ConfigError
from fedbayes.federation.settings import Aggregation, Compression
from fedbayes.federation.stages.report_codec import FEWEST, Compressor


def check(
    settings: Compression,
    method: AnyMethod,
    aggregation: Aggregation,
    initial: Tensors,
) -> None:
    """Check that messages can be compressed with these settings.

    Args:
        settings: the `[compression]` table.
        method: of the run.
        aggregation: what is done with reports.
        initial: the network's weights and buffers.

    Raises:
        ConfigError: they cannot; the text says why, and what would do.
    """
    if not settings.active:
        return
    if settings.down != "none" and not _starts_at_server(method):
        raise ConfigError(
            f"compression.down does not work with {method.name}, which can compress only the "
            "updates of clients. Leave it out"
        )
    if settings.up in ("top-k", "random-k") and aggregation.rule in ("median", "trimmed-mean"):
        raise ConfigError(
            f"aggregation.rule = {aggregation.rule!r} needs values for each entry, but "
            f"compression.up = {settings.up!r} sets nearly all entries to zero. Set "
            "aggregation.rule = 'krum', or compression.up = 'int8'"
        )
    narrow = sorted(name for name, t in initial.items() if t.dtype == torch.bfloat16)
    if settings.down == "bf16" and narrow:
        raise ConfigError(
            f"compression.down = 'bf16' has no effect on weights in bf16, such as {narrow[0]!r} "
            "of this model. Leave it out"
        )


def _starts_at_server(method: AnyMethod) -> bool:
    """Whether a broadcast has tensors of the same names as reports: others stay as they are."""
    return any(p.origin == "server" for p in Reports.of(method).parts.values())


def remarks(settings: Compression, link: Compressor) -> list[str]:
    """What a user should know before the first round, a sentence each.

    Args:
        settings: of the run.
        link: what they come to under its method.
    """
    if not settings.active:
        return []
    method, run = link.method, link.run
    message = method.message(method.init(run), RoundContext(run, 1, 0))
    expected = method.expected(message, run)
    names, parts, declared = link.shrinks(expected), link.parts(expected), Reports.of(method)
    if not names:
        return [
            f"compression has no effect: it needs tensors of {FEWEST} real numbers or more, and "
            "this network has none. Leave it out"
        ]
    if settings.error_feedback or settings.up not in ("top-k", "int8"):
        return []
    # What does not arrive is in the next change of a client that tracks it, without error feedback.
    if all(declared.part(parts[name]).tracked for name in names):
        return [
            f"compression.error_feedback has no effect: {method.name} itself sends again "
            "what did not arrive"
        ]
    if settings.up == "top-k":
        return [
            "compression.error_feedback = false with top-k: smaller changes are lost, so updates "
            "are biased"
        ]
    return []
