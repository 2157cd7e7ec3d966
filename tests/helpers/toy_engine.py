"""An engine that takes a file and a row of the table: the cohort's clients, last one first."""

from fedbayes.federation.engine_table import EngineKind
from fedbayes.federation.engines.sequential import Sequential


class Backwards(Sequential):
    """Runs the tasks of a round from the last to the first."""

    def train(self, tasks):
        done = [next(super(Backwards, self).train([task])) for task in reversed(list(tasks))]
        return reversed(done)


def start(simulation):
    return Backwards(simulation.runtime)


TOY = EngineKind("clients from the last to the first", start="tests.helpers.toy_engine:start")
