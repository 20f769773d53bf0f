"""What makes sandboxes. Import them as `sandbox_gym.backends`."""

if __name__ != "sandbox_gym.backends":
    raise ImportError(
        f"import sandbox_gym.backends, not {__name__}: the same modules twice would be two of each class"
    )
