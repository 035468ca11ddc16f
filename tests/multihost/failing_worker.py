"""One process of two, of which the second fails by itself, and the first waits for it.

python failing_worker.py
"""

import jax
import numpy as np

from grpo_eqx.distributed.exchange import gather_rows
from grpo_eqx.distributed.startup import initialize

if __name__ == "__main__":
    initialize()
    gather_rows(np.zeros(1))
    if jax.process_index() == 1:
        raise OSError("the disk is full")
    gather_rows(np.zeros(1))
