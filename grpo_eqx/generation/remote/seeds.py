"""Seeds of requests: a server that honors them repeats its draws."""

import hashlib

from grpo_eqx.data.trajectory import Address


def request_seed(seed: int, address: Address, num_tokens: int) -> int:
    """Returns the seed of a request, from 0 to 2**31 - 1.

    **Arguments:**

    - `seed`: seed of the run.
    - `address`: address of the completion's draws.
    - `num_tokens`: tokens of the completion before the request.
    """
    text = "/".join(map(str, (seed, *address, num_tokens)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1
