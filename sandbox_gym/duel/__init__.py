"""Duels: a person reads two continuations of one moment and says which is better; what is said can be learnt from.

`sandbox-gym duel` shows those of CallAgent-v0 on a local web page. For others, `serve` takes any `Duel`s.
"""

from sandbox_gym.duel.pairs import Duel, call_agent_duels
from sandbox_gym.duel.preferences import Preference, append, fit, load
from sandbox_gym.duel.server import serve

__all__ = ["Duel", "Preference", "append", "call_agent_duels", "fit", "load", "serve"]
