"""Simulator: the machines, driver, engine steps and codec of the program on a virtual clock and a seeded network.

clock       virtual time
channel     a fading radio channel, as the rate of a link
network     links between named hosts, in order as a WebSocket or, for robustness tests, unreliable
host        an engine in virtual time, shared by the machines that run on the host
stages      an engine cut into stages, in virtual time
session     one machine of one request, the simulator's `Ports`
simulation  requests played from start to end
workflows   workflows on processing units, which drives the scheduler of `paceline.workflow`

For tests and for the simulations of `paceline bench`. Knows nothing of tokenizers and documents.
"""

from lab.simulation.channel import Channel as Channel
from lab.simulation.channel import FadingChannel as FadingChannel
from lab.simulation.channel import RadioParameters as RadioParameters
from lab.simulation.host import Accelerator as Accelerator
from lab.simulation.host import StepCost as StepCost
from lab.simulation.host import Watts as Watts
from lab.simulation.network import Network as Network
from lab.simulation.session import SimulatedRequest as SimulatedRequest
from lab.simulation.session import SimulatedSession as SimulatedSession
from lab.simulation.simulation import SentMessage as SentMessage
from lab.simulation.simulation import Simulation as Simulation
from lab.simulation.stages import StageTimes as StageTimes
