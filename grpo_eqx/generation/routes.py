"""Experts that a sampler's routers chose for the tokens of a rollout, to be replayed in training.

They stay on the devices: a choice is made for each token, layer and slot of an expert, hundreds of
bytes a token, where the token itself has four. Each device has some layers of all tokens, as slots
put, and rows take, any of the tokens.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Integer

from grpo_eqx.sharding.arrays import shapes_of
from grpo_eqx.sharding.rules import last_dim_sharding


class Routes(NamedTuple):
    """Routes of `P` prompts with `G` completions each, in the order of `ModelConfig.routes`."""

    prompts: Integer[Array, "P Tp Lk"]
    """Experts of each token of a prompt, padded on the right."""
    completions: Integer[Array, "P G Tc Lk"]
    """Experts of the input before each token of a completion, which for the first is the prompt's
    last token."""

    def split_by_layer(self, mesh: jax.sharding.Mesh) -> "Routes":
        """Returns the routes split by layer over all devices, as rows take any of the tokens."""
        return Routes(
            *(
                jax.lax.with_sharding_constraint(x, last_dim_sharding(mesh, x.shape))
                for x in (self.prompts, self.completions)
            )
        )


def shapes_of_routes(
    of_token: jax.ShapeDtypeStruct,
    prompts: tuple[int, int],
    completions: tuple[int, int, int],
    mesh: jax.sharding.Mesh,
) -> Routes:
    """Returns the shapes of a rollout's routes.

    **Arguments:**

    - `of_token`: the shape of a token's routes.
    - `prompts`: the numbers of prompts and of their padded tokens.
    - `completions`: the numbers of prompts, completions of each, and padded tokens.
    - `mesh`: the devices.
    """

    def routes() -> Routes:
        return Routes(
            *(
                jnp.zeros((*dims, *of_token.shape), of_token.dtype)
                for dims in (prompts, completions)
            )
        )

    shapes = jax.eval_shape(routes)
    return shapes_of(shapes, jax.tree.map(lambda x: last_dim_sharding(mesh, x.shape), shapes))


@partial(jax.jit, static_argnames="mesh")
def replaced(
    kept: Routes, fresh: Routes, source: Int[Array | np.ndarray, " P"], mesh: jax.sharding.Mesh
) -> Routes:
    """Returns routes whose prompt `p` is entry `source[p]` of both, concatenated."""
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b])[source], kept, fresh)
    return both.split_by_layer(mesh)
