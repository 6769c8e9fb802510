"""``flax.nnx.Linear`` as one kernel."""

from flax import nnx
from jax import lax

from jax_streamk.flax.forward import check_fields, forward


class Linear(nnx.Linear):
    """``flax.nnx.Linear``, and an activation, by one call of ``jax_streamk.linear``.

    Arguments are those of Flax's class and the two below; parameters, their names, initial values and metadata are Flax's. Sums and
    bias are float32 and rounded once, where Flax rounds the product before it adds the bias.

    Args:
      activation: None, "relu", "gelu" (the exact one, by erf), "gelu_tanh", "silu", "sigmoid" or "tanh".
      schedule: ``Auto()``, ``DataParallel()``, ``SplitK(...)``, ``StreamK(...)``, or a ``PerPass`` of them; None is ``Auto()``.
      dot_general: a product of the user's own. Bias and activation then follow it, as in Flax's class.

    Raises:
      TypeError: schedule is not a schedule.
      ValueError: there is no such activation, a schedule meets a product of the user's own, or (when called) no kernel can run the
        product under the schedule.
    """

    def __init__(self, in_features, out_features, *, activation=None, schedule=None, **kwargs):
        super().__init__(in_features, out_features, **kwargs)
        self.activation = activation
        self.schedule = schedule
        check_fields(self, self._own_dot_general())

    def __call__(self, inputs, out_sharding=None):
        """Array of shape (..., out_features) of inputs of shape (..., in_features), with the sharding if one is given."""
        kernel = self.kernel[...]
        bias = None if self.bias is None else self.bias[...]
        promoted = self.promote_dtype((inputs, kernel, bias), dtype=self.dtype)
        return forward(self, self._own_dot_general(), *promoted, self.preferred_element_type, out_sharding=out_sharding)

    def _own_dot_general(self):
        return None if self.dot_general is lax.dot_general else self.dot_general
