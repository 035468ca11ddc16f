"""Shape names used in signatures throughout the package.

One letter or word means one thing everywhere:

- `P`: prompts in a batch, `G`: completions of one prompt (its group);
- `Tp`, `Tc`: prompt and completion length in tokens, padding included;
- `N`, `K`: query heads and key/value heads, `D`: the size of a head;
- `L`: layers, `H`: hidden size, `V`: vocabulary size.
"""

from typing import Literal

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

PromptIds = Int[jax.Array | np.ndarray, "P Tp"]
PromptMask = Bool[jax.Array | np.ndarray, "P Tp"]
TokenFloats = Float[jax.Array | np.ndarray, "P G Tc"]
GroupFloats = Float[jax.Array | np.ndarray, "P G"]

Remat = Literal["none", "dots", "full"]
"""What a layer keeps for the backward pass: everything, its matrix products, or only its input."""
