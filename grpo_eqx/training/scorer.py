"""Scores of completions under a model: log-probs and entropies of their tokens."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from grpo_eqx.common.compiler import Compiler
from grpo_eqx.generation.routes import Routes
from grpo_eqx.models.interface import CausalLM
from grpo_eqx.training.forward import Forward
from grpo_eqx.training.rows import Rows, row_sharding

SCORE, SCORE_REFERENCE, SCORE_SHARE = "score", "score_reference", "score_share"
"""Keys of the program in `Compiler.start`: compiled for the policy and a rollout, for the
reference, and for the policy and a share of the rollout."""
MICRO_BATCHES = "micro_batches"
"""Scope of the loops over micro-batches, by which the planner finds them."""


class TokenScores(NamedTuple):
    """Scores of the tokens of rows under a model, float32, at the sampling temperature."""

    logps: Float[Array, "M R S"]
    entropies: Float[Array, "M R S"]


def score(
    model: CausalLM,
    rows: Rows,
    routes: Routes | None,
    temperature: Float[Array, ""],
    forward: Forward,
) -> TokenScores:
    """Computes the scores of the tokens in rows; those of micro-batches not in use are 0."""

    def add(index: Int[Array, ""], scores: TokenScores) -> TokenScores:
        stats = forward(model, rows.micro_batch(index), routes, temperature).stats
        own = TokenScores(stats.logps, stats.entropies)
        put = partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0)
        return jax.tree.map(put, scores, own)

    zeros = jnp.zeros(rows.targets.shape, jnp.float32)
    with jax.named_scope(MICRO_BATCHES):
        scores = jax.lax.fori_loop(jnp.int32(0), rows.number, add, TokenScores(zeros, zeros))
    return jax.lax.with_sharding_constraint(scores, row_sharding(forward.mesh))


class Scorer:
    """The compiled `score`, with what it needs besides arrays."""

    def __init__(self, forward: Forward, temperature: float, compiler: Compiler | None = None):
        """**Arguments:**

        - `forward`: strategies of the forward pass.
        - `temperature`: divisor of the logits.
        - `compiler`: compiles the program; by default one of its own.
        """
        self.forward = forward
        self.temperature = temperature
        self._compiler = compiler or Compiler()
        self._jitted = self._compiler.jit(SCORE, partial(score, forward=forward))

    def __call__(
        self,
        model: CausalLM,
        rows: Rows,
        routes: Routes | None = None,
        *,
        is_reference: bool = False,
    ) -> TokenScores:
        """Scores the tokens of rows.

        **Arguments:**

        - `model`: the policy or the reference model.
        - `rows`: the trajectories.
        - `routes`: the rollout's experts. The policy replays them, if there are some; the
          reference, another model, chooses its own.
        - `is_reference`: whether the model is the reference.
        """
        for key in (SCORE, SCORE_REFERENCE, SCORE_SHARE):
            self._compiler.wait(key)
        rows = rows.without_loss()
        if is_reference:
            rows, routes = rows.without_routes(), None
        return self._jitted(model, rows, routes, np.float32(self.temperature))

    def lower(self, model: CausalLM, rows: Rows, routes: Routes | None) -> jax.stages.Lowered:
        """Lowers the program for the shapes of `model`, `rows` and `routes`, as of a call."""
        return self._jitted.lower(model, rows, routes, jax.ShapeDtypeStruct((), jnp.float32))
