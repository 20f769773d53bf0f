"""For authors of backends and vector environments: checks of what a backend must do, and of equality to Gymnasium's."""

from sandbox_gym.testing.suite import Check, NotConforming, Result, checks, conformance
from sandbox_gym.testing.vector import assert_same, check_vector_env

__all__ = [
    "Check",
    "NotConforming",
    "Result",
    "assert_same",
    "check_vector_env",
    "checks",
    "conformance",
]
