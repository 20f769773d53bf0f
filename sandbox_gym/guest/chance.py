"""Where an environment's chance comes from: begun anew in a copy that is to differ, or carried over a restore."""

from __future__ import annotations

import random
from typing import Any

import gymnasium
import numpy as np


def reseed(env: gymnasium.Env[Any, Any], seed: int) -> None:
    """New chance from here on: every generator that the environment, its wrappers or its spaces hold as an attribute,
    ALE's emulator, and what a method `reseed(seed)` of the environment's own takes care of.
    """
    layers: list[Any] = [env]
    while isinstance(layers[-1], gymnasium.Wrapper):
        layers.append(layers[-1].env)
    for place, layer in enumerate(layers):
        for name, value in list(vars(layer).items()):
            _reseed_generator(value, seed, place, name)
            if isinstance(value, gymnasium.Space):
                value.seed(word(seed, place, name))
    ale = vars(env.unwrapped).get("ale")
    if ale is not None:
        _reseed_ale(env.unwrapped, ale, word(seed, "ale"))
    hook = getattr(env.unwrapped, "reseed", None)
    if callable(hook):
        hook(seed)


def save(env: gymnasium.Env[Any, Any]) -> dict[str, Any] | None:
    """np_random's state, ALE's too; None while nothing has drawn or seeded."""
    unwrapped: Any = env.unwrapped
    generator = vars(unwrapped).get("_np_random")
    if not isinstance(generator, np.random.Generator):
        return None
    bits = generator.bit_generator
    saved = {"kind": type(bits).__name__, "state": bits.state, "seed": unwrapped._np_random_seed}
    if "ale" in vars(unwrapped):
        saved["ale"] = unwrapped.ale.cloneState(include_rng=True).__getstate__()
    return saved


def reset(env: gymnasium.Env[Any, Any], seed: int | None, options: Any, saved: dict[str, Any] | None) -> Any:
    """`env.reset`. With `saved`, np_random goes on from there as if there had been no restore; what else the
    environment draws from is seeded with `seed`, which takes a reset of its own.
    """
    if saved is None:
        return env.reset(seed=seed, options=options)
    unwrapped: Any = env.unwrapped
    if "ale" in saved:  # the emulator's state is all there is, and seeding it takes 0.1 s
        unwrapped.ale.restoreState(_ale_state(unwrapped.ale, saved["ale"]))
    else:
        env.reset(seed=seed, options=options)
    bits = unwrapped.np_random.bit_generator
    if type(bits).__name__ == saved["kind"]:
        bits.state = saved["state"]
        unwrapped._np_random_seed = saved["seed"]
    return env.reset(options=options)


def word(*entropy: int | str) -> int:
    """31 bits of a seed sequence: a seed that every kind of generator takes."""
    words = [
        int.from_bytes(part.encode(), "big") if isinstance(part, str) else part % 2**64 for part in entropy
    ]
    return int(np.random.SeedSequence(words).generate_state(1)[0]) >> 1


def _reseed_generator(generator: Any, *entropy: int | str) -> None:
    """In place, so that whoever else holds the generator sees it too."""
    if isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        bits.state = type(bits)(word(*entropy)).state
    elif isinstance(generator, (np.random.RandomState, random.Random)):
        generator.seed(word(*entropy))


def _ale_state(ale: Any, state: bytes) -> Any:
    """An emulator's state from its bytes. Not by `pickle`: a guest that its agent took over wrote them, and what they
    would run, the next episode's guest would.
    """
    kind: Any = type(ale.cloneState(include_rng=False))
    made = kind.__new__(kind)
    made.__setstate__(state)
    return made


def _reseed_ale(unwrapped: Any, ale: Any, seed: int) -> None:
    """The emulator reads its seed only when it loads the game; the state without its generator survives that."""
    state = ale.cloneState(include_rng=False)
    ale.setInt("random_seed", seed)
    unwrapped.load_game()
    ale.restoreState(state)
