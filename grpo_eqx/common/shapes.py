"""Shape aliases for signatures throughout the package.

A dim's name means the same everywhere:

- `P`: prompts in a batch, `G`: completions of one prompt (its group);
- `Tp`, `Tc`: prompt and completion length in tokens, including padding;
- `N`, `K`: query heads and key/value heads, `D`: head size;
- `L`: layers, `H`: hidden size, `V`: vocabulary size.

A `Number` is a setting that compiled programs take as data: changing it compiles nothing again.
"""

import jax
from jaxtyping import Float

Number = float | Float[jax.Array, ""]
