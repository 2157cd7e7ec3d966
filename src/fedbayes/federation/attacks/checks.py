"""What is seen to before an attack: that it attacks something, and that nobody else is drawn in."""

from collections.abc import Sequence

from fedbayes.contracts import AnyMethod, Federation, RoundContext
from fedbayes.errors import ConfigError
from fedbayes.federation.attacks import ATTACKS
from fedbayes.federation.attacks.adversary import Adversary
from fedbayes.federation.attacks.base import Attack
from fedbayes.federation.engine_table import ENGINES


def check(
    adversary: Adversary,
    method: AnyMethod,
    run: Federation,
    shape: tuple[int, ...],
    *,
    engine: str,
    secure: bool,
) -> None:
    """Check that an attack works with the other settings.

    Args:
        adversary: the malicious clients, and what they do.
        method: of the run.
        run: what no round changes.
        shape: of one sample.
        engine: name of the engine.
        secure: whether the server sees sums of reports alone.

    Raises:
        ConfigError: it does not; the message names settings that work.
    """
    settings, attack = adversary.settings, adversary.attack
    kind, target = settings.kind, run.likelihood.target
    if ENGINES[engine].states == "remote":
        local = ", ".join(name for name, one in ENGINES.items() if one.states != "remote")
        raise ConfigError(
            f"[attack] works only in simulations, not with engine {engine!r}. Choose {local}, or "
            "leave [attack] out"
        )
    if method.reports.pooled:
        raise ConfigError(f"[attack] needs clients, but {method.name} pools all data. Leave it out")
    if settings.start > run.rounds:
        raise ConfigError(
            f"attack.start is {settings.start}, but the run has {run.rounds} rounds, so no round "
            "would be attacked"
        )
    if attack.on_classes and not target.classes:
        others = ", ".join(name for name, one in ATTACKS.items() if not one.on_classes)
        raise ConfigError(
            f"attack.kind {kind!r} needs classes, but the target is of kind {target.kind}. Choose "
            f"{others}"
        )
    if secure and attack.on_reports:
        poisons = type(attack).poison is not Attack.poison
        instead = "Leave attack.scale at 1" if poisons else "choose label-flip or backdoor"
        raise ConfigError(
            f"attack.kind {kind!r} changes single updates, which secure.enabled hides. {instead}, "
            "or leave [secure] out"
        )
    if attack.on_reports and not _reports(method, run):
        raise ConfigError(
            f"attack.kind {kind!r} changes updates, but those of {method.name} are empty. Choose "
            "label-flip or backdoor"
        )
    attack.check(run, shape)


def remarks(adversary: Adversary, cohort: int) -> Sequence[str]:
    """What a user should know of an attack before the first round, a sentence each."""
    return adversary.attack.remarks(len(adversary.clients), cohort)


def _reports(method: AnyMethod, run: Federation) -> bool:
    """Whether clients report anything."""
    message = method.message(method.init(run), RoundContext(run, 1))
    return bool(method.expected(message, run))
