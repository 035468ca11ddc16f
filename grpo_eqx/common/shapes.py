"""Shape aliases for signatures throughout the package.

A dim's name means the same everywhere:

- `P`: prompts in a batch, `G`: completions of one prompt (its group);
- `Tp`, `Tc`: prompt and completion length in tokens, including padding;
- `N`, `K`: query heads and key/value heads, `D`: head size;
- `L`: layers, `H`: hidden size, `V`: vocabulary size.

A `Number` is a setting that compiled programs take as data: changing it compiles nothing again.
"""

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

PromptIds = Int[jax.Array | np.ndarray, "P Tp"]
PromptMask = Bool[jax.Array | np.ndarray, "P Tp"]
TokenFloats = Float[jax.Array | np.ndarray, "P G Tc"]
Number = float | Float[jax.Array, ""]
GroupFloats = Float[jax.Array | np.ndarray, "P G"]
