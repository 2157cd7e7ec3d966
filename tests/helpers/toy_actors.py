"""Methods by which actors of Ray are caught at work."""

import os
import signal
import time

from fedbayes.contracts import About
from fedbayes.methods.scaffold import Scaffold


class Slow(Scaffold):
    """SCAFFOLD, with its private states, that takes its time."""

    name = "slow"
    about = About("slow SCAFFOLD")
    pause: float = 0.5

    def local(self, message, client, samples, at):
        time.sleep(self.pause)
        return super().local(message, client, samples, at)


class Deadly(Scaffold):
    """Its third client takes the process with it."""

    name = "deadly"
    about = About("kills its process")

    def local(self, message, client, samples, at):
        if at.client == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().local(message, client, samples, at)
