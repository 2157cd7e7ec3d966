"""Who attacks, when, and how: the `[attack]` table at work."""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import torch
from pydantic import ValidationError

from fedbayes.contracts import AnyMethod, Federation
from fedbayes.core import seeds
from fedbayes.core.tensors import Samples, Tensors
from fedbayes.errors import ConfigError, did_you_mean
from fedbayes.federation.attacks import find_attack
from fedbayes.federation.attacks.base import Attack
from fedbayes.federation.attacks.settings import AttackSettings
from fedbayes.likelihoods import evaluate

SUCCESS = "attack_success"
"""Name of what a test sample adds to the success of an attack: 1 if it is taken for what the attack
wants, else 0; NaN if it is that anyway."""


@dataclass(frozen=True)
class Adversary:
    """The malicious clients of a run, and what they do."""

    settings: AttackSettings
    """The `[attack]` table."""
    clients: frozenset[int]
    """The malicious clients, the same in every round."""

    @classmethod
    def of(cls, settings: AttackSettings, seed: int, clients: int) -> Self | None:
        """Return the adversary of a run; None for an honest run.

        With one more malicious client, the others stay malicious.

        Args:
            settings: the `[attack]` table.
            seed: of the run.
            clients: number of clients S.

        Raises:
            ConfigError: more malicious clients than clients.
        """
        if not settings.active:
            return None
        if settings.clients > clients:
            raise ConfigError(
                f"attack.clients is {settings.clients}, but there "
                f"{'is 1 client' if clients == 1 else f'are {clients} clients'}"
            )
        order = seeds.numpy_rng(seed, "hostile clients").permutation(clients)
        return cls(settings, frozenset(order[: settings.clients].tolist()))

    @cached_property
    def attack(self) -> Attack:
        """What they do; a class of the user's own is imported only now.

        Raises:
            ConfigError: there is no such class, or its fields do not take what is set.
        """
        kind = find_attack(self.settings.kind)
        try:
            return kind(**self.settings.fields(kind.model_fields))
        except ValidationError as error:
            raise ConfigError(_explain(kind, error)) from None

    def attacks(self, client: int, number: int) -> bool:
        """Whether a client attacks in a round."""
        return client in self.clients and number >= self.settings.start

    def hostile(self, cohort: list[int], number: int) -> list[int]:
        """The clients of a cohort that attack in a round."""
        return [client for client in cohort if self.attacks(client, number)]

    @property
    def words(self) -> str:
        """Who does what from when, for people."""
        several = len(self.clients) > 1
        who = ", ".join(map(str, sorted(self.clients)))
        since = f" from round {self.settings.start} on" if self.settings.start > 1 else ""
        return f"attack {self.settings.kind} by client{'s' * several} {who}{since}"

    def poisoned(self, samples: Samples, run: Federation, client: int, number: int) -> Samples:
        """What a client trains on in a round: its own samples, unless it poisons them."""
        if not self.attacks(client, number):
            return samples
        rng = seeds.torch_rng(run.seed, "attack on data", round=number, client=client)
        return self.attack.poison(samples, run, rng)

    def success(
        self, model: Tensors, samples: Samples, method: AnyMethod, run: Federation
    ) -> Tensors:
        """What test samples add to the success of the attack, float64 [n] under `SUCCESS`;
        nothing if it has no aim that a model can be tried for.
        """
        wanted = self.attack.triggered(samples)
        if wanted is None:
            return {}
        hits = evaluate(run.likelihood, method.draws(model, run), wanted).get("correct")
        if hits is None:
            return {}
        return {SUCCESS: hits.masked_fill((samples.y == wanted.y).cpu(), torch.nan)}


def success_of(terms: Tensors) -> float | None:
    """Share of the samples that the attack is about in which it succeeds; None if it has no aim."""
    return float(terms[SUCCESS].nanmean()) if SUCCESS in terms else None


def _explain(kind: type[Attack], error: ValidationError) -> str:
    """A line for each field: its key, its value, and what is allowed."""
    lines = []
    for details in error.errors():
        name = str(details["loc"][0]) if details["loc"] else ""
        key = f"attack.arguments.{name}"
        if details["type"] == "extra_forbidden":
            known = ", ".join(kind.model_fields) or "none"
            like = did_you_mean(name, kind.model_fields)
            lines.append(f"{key} is not a field of {kind.__name__}{like}. It has {known}")
        else:
            message = details["msg"].removeprefix("Value error, ")
            lines.append(f"{key} is {details['input']!r}; {message[:1].lower()}{message[1:]}")
    return "\n".join(lines)
