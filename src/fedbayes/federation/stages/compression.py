"""What a user should know of compression before the first round."""

from fedbayes.contracts import Reports, RoundContext
from fedbayes.federation.settings import Compression
from fedbayes.federation.stages.report_codec import FEWEST, Compressor


def remarks(settings: Compression, link: Compressor) -> list[str]:
    """What a user should know before the first round, a sentence each."""
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
