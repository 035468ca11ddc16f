"""Dialogues of several turns with made-up replies, and what a plain loop samples for them."""

import random
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grpo_eqx.common.random_keys import sample_keys, token_keys
from grpo_eqx.data.trajectory import Address, Trajectory
from grpo_eqx.generation import LocalSampler, SamplerOptions, Sampling, Stopping
from grpo_eqx.generation.sampling import sample_tokens
from grpo_eqx.generation.turns import TOKENS_AT_ONCE
from grpo_eqx.models.causal_attention import BlockedAttention
from grpo_eqx.models.decoder import Decoder
from grpo_eqx.models.families.gemma3 import Gemma3Config
from grpo_eqx.models.families.qwen2 import Qwen2Config
from grpo_eqx.sharding import ExplicitMesh

VOCAB, EOS, P, G, LONGEST = 29, (3, 5, 6), 8, 2, 60
SIZES: Mapping[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "head_dim": 8,
}  # fmt: skip
CONFIGS = {
    "qwen2": Qwen2Config(**SIZES),
    "windows": Gemma3Config(
        **SIZES, sliding_window=6, layer_types=("sliding_attention", "full_attention")
    ),
}
ONE_DEVICE = ExplicitMesh(dp=1, fsdp=1, tp=1)
SAMPLING = Sampling(temperature=0.9)


def trajectories() -> list[Trajectory]:
    """Prompts, after which every third completion begins with tokens of others."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(7, VOCAB, size=size).tolist() for size in (7, 4, 1, 9, 2, 5, 8, 3)]
    begun = []
    for number in range(P * G):
        each = Trajectory(prompts[number // G], Address(5, *divmod(number, G)))
        given = rng.integers(VOCAB, size=rng.choice([1, 3, TOKENS_AT_ONCE + 3]))
        begun.append(each if number % 3 else each.extended(given, version=7))
    return begun


def reply(number: int, turn: int) -> list[int] | None:
    """Up to three replies to a completion, some longer than what is read at once."""
    rng = random.Random(f"{number} {turn}")
    if turn > number % 4:
        return None
    return [rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 5, TOKENS_AT_ONCE + 3]))]


def sampler(mesh: ExplicitMesh | None = None, **options: Any) -> LocalSampler:
    mesh = mesh or ONE_DEVICE
    settings: dict[str, Any] = {
        "sampling": SAMPLING, "max_prompt_length": 10, "max_completion_length": LONGEST,
        "stopping": Stopping.of_ids(EOS, VOCAB), "pad_id": 0, "seed": 0,
        "dtype": jnp.dtype("float32"), "attention": BlockedAttention(), **options,
    }  # fmt: skip
    devices = jax.devices()[: mesh.dp * mesh.fsdp * mesh.tp]
    return LocalSampler(SamplerOptions(**settings), mesh.build(devices))


def one_at_a_time(model: Decoder) -> list[Trajectory]:
    """The whole context anew for every token."""
    width = 10 + LONGEST
    logits = jax.jit(
        lambda ids, last: model.logits(ids[None], (jnp.arange(width) <= last)[None])[0, last]
    )
    draw = jax.jit(lambda logits, key: sample_tokens(logits, key, SAMPLING))
    keys = sample_keys(0, jnp.int32(5), jnp.arange(P), G).reshape(-1)
    done = []
    for number, each in enumerate(trajectories()):
        ids, logps = each.ids.tolist(), each.sampler_logps.tolist()
        written, turn, reason = each.written.tolist(), 0, None
        while reason is None:
            context = np.zeros(width, np.int32)
            known = [*each.prompt_ids, *ids]
            context[: len(known)] = known
            row = logits(jnp.asarray(context), len(known) - 1)
            token, logp = draw(row, token_keys(keys[number], jnp.int32(len(ids))))
            ids, logps, written = [*ids, int(token)], [*logps, float(logp)], [*written, True]
            if ids[-1] in EOS:
                turn += 1
                follows = reply(number, turn)
                if follows is None:
                    reason = "stop"
                elif len(ids) + len(follows) >= LONGEST:
                    reason = "length"
                else:
                    ids += follows
                    logps += [0.0] * len(follows)
                    written += [False] * len(follows)
            elif len(ids) == LONGEST:
                reason = "length"
        done.append(
            Trajectory(
                each.prompt_ids, each.address, np.array(ids), np.array(written), np.array(logps),
                np.full(len(ids), 7), reason,
            )
        )  # fmt: skip
    return done


def check_same(found: list[Trajectory], expected: list[Trajectory], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.prompt_ids, one.address) == (other.prompt_ids, other.address)
        assert one.ids.tolist() == other.ids.tolist()
        assert one.written.tolist() == other.written.tolist()
        assert one.versions.tolist() == other.versions.tolist()
        assert one.finish_reason == other.finish_reason
        np.testing.assert_allclose(one.sampler_logps, other.sampler_logps, rtol=0, atol=tolerance)
