"""Evals: a policy on a data set of tasks, so many attempts at each, with what they say in numbers."""

from __future__ import annotations

from sandbox_gym.evals.attempts import Attempt
from sandbox_gym.evals.policies import Group, Policy, beam_search, best_of_n, group, nothing, reference
from sandbox_gym.evals.runner import evaluate
from sandbox_gym.evals.summary import Estimate, Summary

__all__ = [
    "Attempt",
    "Estimate",
    "Group",
    "Policy",
    "Summary",
    "beam_search",
    "best_of_n",
    "evaluate",
    "group",
    "nothing",
    "reference",
]
