"""Building blocks of a layer: linear maps, RMSNorm, gated activations."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int8

from grpo_eqx.models.product import inner_products, product
from grpo_eqx.models.rounding import rounded_rows


class LowRank(eqx.Module):
    """`scale * b.T @ a`, which LoRA (arXiv 2106.09685) adds to a frozen weight."""

    a: Float[Array, "*stack rank in"]
    b: Float[Array, "*stack rank out"]
    """Transposed: a TPU pads the last dimension to 128, and ranks are smaller."""
    scale: float = eqx.field(static=True)

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        """Computes what is added to the outputs."""
        # In both passes, the inner product is scaled, which is smaller than the outputs.
        inner = _project(x, self.a) * jnp.asarray(self.scale, x.dtype)
        return _project(inner, self.b.swapaxes(-1, -2))

    def delta(self) -> Float[Array, "*stack out in"]:
        """Computes what is added to the weight, float32."""
        a, b = self.a.astype(jnp.float32), self.b.astype(jnp.float32)
        return self.scale * product("...ro,...ri->...oi", b, a)


class Linear(eqx.Module):
    """`x @ weight.T + bias`, with the weight laid out as Hugging Face stores it, `[out, in]`."""

    weight: Float[Array, "*stack out in"] | Int8[Array, "*stack out in"]
    bias: Float[Array, "*stack out"] | None = None
    scales: Float[Array, "*stack out"] | None = None
    """Scale of each output, by which the product with an int8 weight is multiplied."""
    adapter: LowRank | None = None
    """Trained addition to the weight, which then is frozen."""

    def merged(self) -> "Linear":
        """Returns the map without adapter, whose weight is the sum, float32."""
        if self.adapter is None:
            return self
        weight = self.weight.astype(jnp.float32)
        weight = weight if self.scales is None else weight * self.scales[..., None]
        weight = weight + self.adapter.delta()
        return dataclasses.replace(self, weight=weight, scales=None, adapter=None)

    def astype(self, dtype: jax.typing.DTypeLike) -> "Linear":
        """Returns the map with every array in `dtype`, but for int8 weights and their scales."""
        cast = jax.tree.map(lambda x: x.astype(dtype), self)
        if self.scales is None:
            return cast
        return dataclasses.replace(cast, weight=self.weight, scales=self.scales)

    def rounded(self, dtype: jax.typing.DTypeLike) -> "Linear":
        """Returns the map with an int8 weight and the bias in `dtype`, for forward passes alone."""
        bias = None if self.bias is None else self.bias.astype(dtype)
        if self.scales is not None:  # rounded already
            return Linear(self.weight, bias, self.scales)
        weight, scales = rounded_rows(self.weight)
        return Linear(weight, bias, scales)

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        # int8 numbers are exact in bfloat16, and unpacked within the product. Its result is rounded
        # to the dtype of `x` before it is scaled: where devices add up parts of it, float32 would
        # be twice the bytes.
        y = _project(x, self.weight.astype(x.dtype))
        # Named so that rematerialization finds the product, which `custom_vjp` hides from it.
        y = checkpoint_name(y, "product")
        if self.scales is not None:
            y = (y * self.scales).astype(x.dtype)
        if self.adapter is not None:
            y = y + self.adapter(x)
        return y if self.bias is None else y + self.bias


@jax.custom_vjp
def _project(
    x: Float[Array, "*batch in"], weight: Float[Array, "out in"]
) -> Float[Array, "*batch out"]:
    """Computes the product with a weight, in the dtype of both."""
    return jnp.einsum("...i,oi->...o", x, weight)


def _project_forward(
    x: Float[Array, "*batch in"], weight: Float[Array, "out in"]
) -> tuple[Float[Array, "*batch out"], tuple[Array, Array]]:
    return _project(x, weight), (x, weight)


def _project_backward(
    residuals: tuple[Array, Array], dy: Float[Array, "*batch out"]
) -> tuple[Float[Array, "*batch in"], Float[Array, "out in"]]:
    """Computes the usual gradients, that of the weight from a plain list of tokens.

    Automatic differentiation would contract several axes at once, for which XLA's CPU compiler has
    no fast product.
    """
    x, weight = residuals
    flat_x, flat_dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    of_weight = jnp.einsum("to,ti->oi", flat_dy, flat_x)
    return jnp.einsum("...o,oi->...i", dy, weight), of_weight


_project.defvjp(_project_forward, _project_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def rms_norm(
    x: Float[Array, "*batch H"], scale: Float[Array, " H"], eps: float, offset: float = 0.0
) -> Float[Array, "*batch H"]:
    """Applies root-mean-square normalization (arXiv 1910.07467) with float32 statistics.

    Its backward pass normalizes again: nothing but the arguments is kept for it.

    **Arguments:**

    - `x`, `scale`: the input, and the scale.
    - `eps`: added to the mean of squares.
    - `offset`: added to the scale, in float32.
    """
    normed, _ = _normed(x, eps)
    if offset == 0:
        return scale * normed.astype(x.dtype)
    return (_float32_scale(scale, offset) * normed).astype(x.dtype)


def _float32_scale(scale: Float[Array, " H"], offset: float) -> Float[Array, " H"]:
    return scale.astype(jnp.float32) + offset


def _normed(
    x: Float[Array, "*batch H"], eps: float
) -> tuple[Float[Array, "*batch H"], Float[Array, "*batch 1"]]:
    """Normalizes in float32; returns the factor too."""
    x32 = x.astype(jnp.float32)
    factor = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return x32 * factor, factor


def _rms_norm_forward(
    x: Float[Array, "*batch H"], scale: Float[Array, " H"], eps: float, offset: float
) -> tuple[Float[Array, "*batch H"], tuple[Array, Array]]:
    return rms_norm(x, scale, eps, offset), (x, scale)


def _rms_norm_backward(
    eps: float, offset: float, residuals: tuple[Array, Array], dy: Float[Array, "*batch H"]
) -> tuple[Float[Array, "*batch H"], Float[Array, " H"]]:
    x, scale = residuals
    normed, factor = _normed(x, eps)
    dy32 = dy.astype(jnp.float32)
    scaled = dy32 * _float32_scale(scale, offset)
    along = inner_products(scaled, normed)[..., None] / x.shape[-1]
    dx = factor * (scaled - normed * along)
    by_scale = (dy32 * normed).reshape(-1, x.shape[-1]).sum(axis=0)
    return dx.astype(x.dtype), by_scale.astype(scale.dtype)


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


@jax.custom_vjp
def swiglu(
    gate: Float[Array, "*batch I"], up: Float[Array, "*batch I"]
) -> Float[Array, "*batch I"]:
    """Computes `silu(gate) * up` (arXiv 2002.05202).

    Its backward pass keeps the arguments alone, where automatic differentiation would keep four
    more arrays of that size.
    """
    return jax.nn.silu(gate) * up


def _swiglu_forward(
    gate: Float[Array, "*batch I"], up: Float[Array, "*batch I"]
) -> tuple[Float[Array, "*batch I"], tuple[Array, Array]]:
    return swiglu(gate, up), (gate, up)


def _swiglu_backward(
    residuals: tuple[Array, Array], dy: Float[Array, "*batch I"]
) -> tuple[Float[Array, "*batch I"], Float[Array, "*batch I"]]:
    gate, up = residuals
    share = jax.nn.sigmoid(gate)
    silu = gate * share
    return dy * up * (share + silu * (1 - share)), dy * silu


swiglu.defvjp(_swiglu_forward, _swiglu_backward)


def geglu(gate: Float[Array, "*batch I"], up: Float[Array, "*batch I"]) -> Float[Array, "*batch I"]:
    """Computes `gelu(gate) * up` (arXiv 2002.05202), with the tanh form of GELU."""
    return jax.nn.gelu(gate, approximate=True) * up
