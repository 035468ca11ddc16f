"""Pre-training of small models from scratch, on the CPU."""

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from grpo_eqx.common.random_keys import make_key
from grpo_eqx.data.trajectory import Group
from grpo_eqx.loss_backends import DenseLoss
from grpo_eqx.models.causal_attention import BlockedAttention
from grpo_eqx.models.families.qwen2 import Qwen2, Qwen2Config
from grpo_eqx.models.pretrained import save_pretrained
from grpo_eqx.sharding import parse_mesh
from grpo_eqx.training import Forward, Packing, Rows, RowShape
from grpo_eqx.training.rows import pack, place_tokens

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


def train_tokenizer(
    texts: Iterable[str], chat_template: str, vocab_size: int, tags: tuple[str, ...] = ()
) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE with single digits, and the special tokens of Qwen2.5.

    **Arguments:**

    - `texts`: what the tokenizer is trained on.
    - `chat_template`: the template, which it keeps.
    - `vocab_size`: number of tokens, without the tags.
    - `tags`: texts that are tokens besides.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[START, END],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def new_model(vocab_size: int, seed: int) -> Qwen2:
    """Draws a Qwen2 of four layers."""
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        rope_theta=10_000.0,
    )
    model = Qwen2.init(config, make_key(seed))
    print(f"{sum(x.size for x in jax.tree.leaves(model)):,} parameters, {vocab_size} tokens")
    return model


def pretrain(
    model: Qwen2,
    make_batch: Callable[[int], list[Group]],
    shape: RowShape,
    *,
    steps: int,
    learning_rate: float,
) -> Qwen2:
    """Predicts the next token of what trajectories have written, reading each prompt once.

    **Arguments:**

    - `model`: the model.
    - `make_batch`: makes the trajectories of a step, from its number.
    - `shape`: the shape of a batch, in one micro-batch.
    - `steps`: number of optimizer steps.
    - `learning_rate`: its peak: linear warm-up over a tenth of the steps, then cosine down to a
      tenth.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, steps // 10, steps, learning_rate / 10
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01)
    )

    def loss_of(model: Qwen2, rows: Rows, written: Bool[Array, "R S"]) -> Float[Array, ""]:
        stats = forward(model, rows, None, temperature=1.0).stats
        return -jnp.sum(stats.logps, where=written) / written.sum()

    @jax.jit
    def step(
        model: Qwen2, opt_state: optax.OptState, rows: Rows, written: Bool[Array, "1 R S"]
    ) -> tuple[Qwen2, optax.OptState, Array]:
        rows = rows.micro_batch(jnp.int32(0))
        loss, gradient = jax.value_and_grad(loss_of)(model, rows, written[0])
        updates, opt_state = optimizer.update(gradient, opt_state, model)
        return optax.apply_updates(model, updates), opt_state, loss

    mesh = parse_mesh("auto").build(jax.devices()[:1])
    forward = Forward(
        backend=DenseLoss(), mesh=mesh, dtype=jnp.dtype("float32"), remat="none",
        attention=BlockedAttention(),
    )  # fmt: skip
    opt_state = optimizer.init(model)
    start = time.perf_counter()
    for i in range(steps):
        groups = make_batch(i)
        prompt_lengths = np.array([len(group[0].prompt_ids) for group in groups])
        lengths = np.array([[len(each) for each in group] for group in groups])
        packing = Packing.plan(prompt_lengths, lengths, shape)
        written = place_tokens([each.written for group in groups for each in group], packing, mesh)
        model, opt_state, loss = step(model, opt_state, pack(groups, packing, mesh), written)
        if i % 50 == 0 or i == steps - 1:
            print(f"step {i:5d}  loss {loss:.4f}  {time.perf_counter() - start:.0f} s", flush=True)
    return model


def save(model: Qwen2, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes weights in bfloat16, config and tokenizer."""
    save_pretrained(model, folder, dtype=jnp.bfloat16)
    tokenizer.save_pretrained(folder)
    generation = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
