"""Which methods and settings allow compression."""

import torch

from fedbayes.contracts import AnyMethod, Reports
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
    """See that messages can be compressed as is asked for.

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
            f"compression.down is not for {method.name}, of whose messages only what clients "
            "report can be compressed; leave it out"
        )
    if settings.up in ("top-k", "random-k") and aggregation.rule in ("median", "trimmed-mean"):
        raise ConfigError(
            f"aggregation.rule = {aggregation.rule!r} goes entry by entry, and with compression.up "
            f"= {settings.up!r} nearly all reports say zero of nearly every one, which then stays "
            "as it is; have rule = 'krum', or up = 'int8'"
        )
    narrow = sorted(name for name, t in initial.items() if t.dtype == torch.bfloat16)
    if settings.down == "bf16" and narrow:
        raise ConfigError(
            f"compression.down = 'bf16' has no effect on weights in bf16, such as {narrow[0]!r} of "
            "this model; leave it out"
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
    if settings.active and not link.compressed:
        return [
            "compression has no effect: it is of tensors of "
            f"{FEWEST} real numbers or more, and messages of this network have none; leave it out"
        ]
    if settings.error_feedback or settings.up not in ("top-k", "int8"):
        return []
    if link.repeated:
        return [
            "compression.error_feedback has no effect: clients say again what did not arrive, "
            f"which {link.method.name} sees to itself"
        ]
    if settings.up == "top-k":
        return [
            "compression.error_feedback = false with top-k: what is not among the largest is lost, "
            "and sums are biased towards what changes most"
        ]
    return []
