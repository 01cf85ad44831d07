"""Simulator: the machines, driver, engine steps and codec of the program on a virtual clock and a seeded network.

- `clock.py`: virtual time.
- `network.py`: links between named hosts, in order as a WebSocket or, for robustness tests, unreliable.
- `host.py`: an engine in virtual time, shared by the machines that run on the host.
- `session.py`: one machine of one request, the simulator's `Ports`.
- `simulation.py`: requests played from start to end.

For tests and for the simulations of `paceline bench`. Knows nothing of tokenizers and documents.
"""

from paceline.runtime.simulation.network import Network as Network
from paceline.runtime.simulation.session import SimulatedRequest as SimulatedRequest
from paceline.runtime.simulation.session import SimulatedSession as SimulatedSession
from paceline.runtime.simulation.simulation import SentMessage as SentMessage
from paceline.runtime.simulation.simulation import Simulation as Simulation
