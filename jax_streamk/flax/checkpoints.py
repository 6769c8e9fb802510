"""How ``flax.serialization`` stores quantized arrays: as the dict of their arrays. Orbax stores pytrees by itself."""

from typing import Any

from flax import serialization

from jax_streamk.quantized import QuantizedArray

_NAMES = "values", "scale", "zero_point", "offset"


def _present(x: QuantizedArray) -> dict[str, Any]:
    return {name: part for name in _NAMES if (part := getattr(x, name)) is not None}


def _to_state(x: QuantizedArray) -> dict[str, Any]:
    return {name: serialization.to_state_dict(part) for name, part in _present(x).items()}


def _from_state(x: QuantizedArray, state: dict[str, Any]) -> QuantizedArray:
    """Raises ValueError if the state is not of an array with the parts of x."""
    present = _present(x)
    if present.keys() != state.keys():
        raise ValueError(f"a QuantizedArray of {', '.join(present)} cannot be restored from {', '.join(state)}")
    parts = {name: serialization.from_state_dict(part, state[name], name) for name, part in present.items()}
    return QuantizedArray.tree_unflatten(x.dtype, [parts.get(name) for name in _NAMES])


def register() -> None:
    serialization.register_serialization_state(QuantizedArray, _to_state, _from_state, override=True)
