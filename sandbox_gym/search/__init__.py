"""Tree search over states that can be branched: MCTS, best-of-n, beam search.

Knows nothing of sandboxes. It runs on any `Model`, on an environment that offers `search_model()`, and on deep copies
of any other Gymnasium environment with `Discrete` actions.
"""

from sandbox_gym.search.beam import beam_search
from sandbox_gym.search.best_of_n import best_of_n
from sandbox_gym.search.deepcopies import DeepcopyModel
from sandbox_gym.search.keys import observation_key
from sandbox_gym.search.mcts import MCTS
from sandbox_gym.search.model import Model, ParallelModel, Playout, Transition, as_model
from sandbox_gym.search.novelty import Novelty
from sandbox_gym.search.result import SearchResult
from sandbox_gym.search.selection import PUCT, Gumbel
from sandbox_gym.search.session import Batch, TreeSearch
from sandbox_gym.search.tree import Node, Tree

__all__ = [
    "MCTS",
    "PUCT",
    "Batch",
    "DeepcopyModel",
    "Gumbel",
    "Model",
    "Node",
    "Novelty",
    "ParallelModel",
    "Playout",
    "SearchResult",
    "Transition",
    "Tree",
    "TreeSearch",
    "as_model",
    "beam_search",
    "best_of_n",
    "observation_key",
]
