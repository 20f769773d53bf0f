"""Environments that come with sandbox_gym. Import them as `sandbox_gym.envs`."""

if __name__ != "sandbox_gym.envs":
    raise ImportError(
        f"import sandbox_gym.envs, not {__name__}: the same modules twice would be two of each class"
    )
