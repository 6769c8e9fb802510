"""How ``flax.serialization`` stores quantized arrays: as the dict of their arrays. Orbax stores pytrees by itself."""

from typing import Any

from flax import serialization

from jax_streamk.quantized import QuantizedArray


def _present(x: QuantizedArray) -> dict[str, Any]:
    return {key.name: part for key, part in x.tree_flatten_with_keys()[0] if part is not None}


def _to_state(x: QuantizedArray) -> dict[str, Any]:
    return {name: serialization.to_state_dict(part) for name, part in _present(x).items()}


def _from_state(x: QuantizedArray, state: dict[str, Any]) -> QuantizedArray:
    """Raises ValueError if the state is not of an array with the parts of x."""
    present = _present(x)
    if present.keys() != state.keys():
        raise ValueError(f"a QuantizedArray of {', '.join(present)} cannot be restored from {', '.join(state)}")
    parts = {name: serialization.from_state_dict(part, state[name], name) for name, part in present.items()}
    keys, dtype = x.tree_flatten_with_keys()
    return QuantizedArray.tree_unflatten(dtype, [parts.get(key.name) for key, _ in keys])


def register() -> None:
    serialization.register_serialization_state(QuantizedArray, _to_state, _from_state, override=True)
