"""Seeds of requests."""

import itertools

from grpo_eqx.data.trajectory import Address
from grpo_eqx.generation.remote import request_seed


def test_each_request_has_a_seed_of_its_own() -> None:
    parts = list(itertools.product((0, 1), (0, 7), (0, 3), (0, 3), (0, 11, 110)))
    seeds = [request_seed(run, Address(*address), n) for run, *address, n in parts]
    assert len({*seeds}) == len(parts)
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_a_seed_stays_the_same() -> None:
    """Runs are continued by later versions."""
    assert request_seed(0, Address(0, 0, 0), 0) == 299901815
