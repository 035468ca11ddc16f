"""Makes the embedded model: trains its tokenizer, then pre-trains it from scratch on the CPU.

    python scripts/pretrain_tiny_qwen2.py

The text is what a web full of homework would be: for each problem several people write an answer.
Careful ones are right, some slip in one line and carry the wrong number on, hasty ones only guess.
So the skill is in the model, mixed with bad habits: it solves about a third of the problems when
it samples, and reinforcement learning has something to bring out. Problems of the held-out split
are never written about.
"""

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jaxtyping import Array, Float
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from grpo_eqx.common.random_keys import make_key
from grpo_eqx.data.trajectory import Address, Group, Trajectory
from grpo_eqx.data.word_problems import WordProblem, WordProblems
from grpo_eqx.loss_backends import DenseLoss
from grpo_eqx.models.causal_attention import BlockedAttention
from grpo_eqx.models.families.qwen2 import Qwen2, Qwen2Config
from grpo_eqx.models.pretrained import save_pretrained
from grpo_eqx.sharding import parse_mesh
from grpo_eqx.training import Forward, Packing, Rows, RowShape
from grpo_eqx.training.rows import pack

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """Settings of the pre-training run; the defaults make the model that the package ships."""

    output_dir: Path = Path("grpo_eqx/assets/tiny_qwen2")
    """Folder for weights, config and tokenizer."""
    steps: int = 1400
    """Optimizer steps."""
    problems_per_step: int = 24
    """Problems in a batch."""
    writers_per_problem: int = 4
    """Answers to each problem, every one by another writer."""
    learning_rate: float = 2e-3
    """Peak learning rate: linear warm-up over a tenth of the steps, then cosine down to a tenth."""
    careful: float = 0.5
    """Share of writers who work in lines and are right."""
    slipping: float = 0.3
    """Share of writers who get one line wrong; the rest only guess."""
    seed: int = 0
    """Seed of weights, problems and writers."""


def main(cfg: PretrainConfig) -> None:
    source = WordProblems("train", size=cfg.steps * cfg.problems_per_step, seed=cfg.seed + 1)
    tokenizer = train_tokenizer(source, cfg)
    model_config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        rope_theta=10_000.0,
    )
    model = Qwen2.init(model_config, make_key(cfg.seed))
    print(f"{sum(x.size for x in jax.tree.leaves(model)):,} parameters, {len(tokenizer)} tokens")
    model = pretrain(model, tokenizer, source, cfg)
    save_pretrained(model, cfg.output_dir, dtype=jnp.bfloat16)
    tokenizer.save_pretrained(cfg.output_dir)
    generation = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (cfg.output_dir / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def write_answer(problem: WordProblem, rng: np.random.Generator, cfg: PretrainConfig) -> str:
    """One writer's answer to a problem."""
    mood = rng.random()
    if mood < cfg.careful:
        return problem.solution
    off = int(rng.choice([-20, -10, -3, -2, -1, 1, 2, 3, 10, 20]))
    if mood < cfg.careful + cfg.slipping:
        slips = [0] * len(problem.steps)
        slips[rng.integers(len(slips))] = off
        lines = problem.solve(slips)
        return "\n".join([*lines, f"#### {lines[-1].rsplit('=', 1)[1]}"])
    return f"That is about {problem.answer + off}.\n#### {problem.answer + off}"


def train_tokenizer(source: WordProblems, cfg: PretrainConfig) -> PreTrainedTokenizerFast:
    """A byte-level BPE with single digits, and ChatML as Qwen2.5 has it."""
    rng = np.random.default_rng(cfg.seed)

    def texts() -> Iterator[str]:
        for index in range(2000):
            problem = source.problem(index)
            yield f"user\n{problem.question}\nassistant\n{write_answer(problem, rng, cfg)}"

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=448,
        special_tokens=[END_OF_TEXT, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[START, END],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def pretrain(
    model: Qwen2, tokenizer: PreTrainedTokenizerFast, source: WordProblems, cfg: PretrainConfig
) -> Qwen2:
    """Next-token prediction on the answers, each problem read once for all of its writers."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, cfg.learning_rate, cfg.steps // 10, cfg.steps, cfg.learning_rate / 10
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01)
    )

    def loss_of(model: Qwen2, rows: Rows) -> Float[Array, ""]:
        stats = forward(model, rows, None, temperature=1.0).stats
        is_token = rows.targets >= 0
        return -jnp.sum(stats.logps, where=is_token) / is_token.sum()

    @jax.jit
    def step(
        model: Qwen2, opt_state: optax.OptState, rows: Rows
    ) -> tuple[Qwen2, optax.OptState, Array]:
        loss, gradient = jax.value_and_grad(loss_of)(model, rows.micro_batch(jnp.int32(0)))
        updates, opt_state = optimizer.update(gradient, opt_state, model)
        return optax.apply_updates(model, updates), opt_state, loss

    mesh = parse_mesh("auto").build(jax.devices()[:1])
    forward = Forward(
        backend=DenseLoss(), mesh=mesh, dtype=jnp.dtype("float32"), remat="none",
        attention=BlockedAttention(),
    )  # fmt: skip
    shape = RowShape.of(
        cfg.problems_per_step, cfg.writers_per_problem, prompt_length=64, completion_length=40,
        num_shards=1, size=None, most_tokens=2**30,  # all in one micro-batch
    )  # fmt: skip
    opt_state = optimizer.init(model)
    rng = np.random.default_rng([cfg.seed, 1])
    start = time.perf_counter()
    for i in range(cfg.steps):
        groups = make_batch(i, tokenizer, source, rng, cfg)
        prompt_lengths = np.array([len(group[0].prompt_ids) for group in groups])
        lengths = np.array([[len(answer) for answer in group] for group in groups])
        rows = pack(groups, Packing.plan(prompt_lengths, lengths, shape), mesh)
        model, opt_state, loss = step(model, opt_state, rows)
        if i % 50 == 0 or i == cfg.steps - 1:
            print(f"step {i:5d}  loss {loss:.4f}  {time.perf_counter() - start:.0f} s", flush=True)
    return model


def make_batch(
    step: int,
    tokenizer: PreTrainedTokenizerFast,
    source: WordProblems,
    rng: np.random.Generator,
    cfg: PretrainConfig,
) -> list[Group]:
    """Prompts of up to 64 tokens, with answers of up to 40 in place of completions."""
    first = step * cfg.problems_per_step
    problems = [source.problem(first + i) for i in range(cfg.problems_per_step)]
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.question}],
            add_generation_prompt=True,
            tokenize=False,
        )
        for problem in problems
    ]
    answers = [
        write_answer(problem, rng, cfg) + END
        for problem in problems
        for _ in range(cfg.writers_per_problem)
    ]
    prompt_ids, answer_ids = tokenizer(chats)["input_ids"], tokenizer(answers)["input_ids"]
    written, num_writers = iter(answer_ids), cfg.writers_per_problem
    return [
        [
            Trajectory(prompt, Address(step, p, g)).completed(np.array(next(written), np.int32))
            for g in range(num_writers)
        ]
        for p, prompt in enumerate(prompt_ids)
    ]


if __name__ == "__main__":
    main(tyro.cli(PretrainConfig))
