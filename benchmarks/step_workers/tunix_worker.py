"""Times GRPO steps of Tunix with its own sampler, for step.py: python tunix_worker.py WORK."""

import os
from importlib.metadata import version
from typing import Any

os.environ["WANDB_MODE"] = "disabled"

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from tunix.models.qwen2 import model as qwen2
from tunix.rl import rl_cluster as cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig
from work import EOS_ID, LEARNING_RATE, PAD_ID, Stopwatch, Work, work_of_command
from work import reward as reward_of_texts


class TokenizerAdapter:
    """A transformers tokenizer as Tunix wants it."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    def encode(self, text: Any, **options: Any) -> list[int]:
        return self.tokenizer.encode(str(text))

    def decode(self, ids: Any, **options: Any) -> str:
        return self.tokenizer.decode(ids)

    def bos_id(self) -> int:
        return PAD_ID

    def eos_id(self) -> int:
        return EOS_ID

    def pad_id(self) -> int:
        return PAD_ID

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


def model_config(work: Work) -> qwen2.ModelConfig:
    sizes = work.model_config()
    return qwen2.ModelConfig(
        num_layers=sizes["num_hidden_layers"],
        vocab_size=sizes["vocab_size"],
        embed_dim=sizes["hidden_size"],
        hidden_dim=sizes["intermediate_size"],
        num_heads=sizes["num_attention_heads"],
        head_dim=sizes["hidden_size"] // sizes["num_attention_heads"],
        num_kv_heads=sizes["num_key_value_heads"],
        rope_theta=int(sizes["rope_theta"]),
        norm_eps=sizes["rms_norm_eps"],
        use_tied_embedding=sizes["tie_word_embeddings"],
    )


def main(work: Work) -> None:
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    steps = work.warmup_steps + work.steps + 1  # a step ends where the next one's rewards begin
    texts = work.texts()
    stopwatch = Stopwatch(work)

    def reward(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
        stopwatch.step_ends()
        return reward_of_texts(completions)

    with mesh:
        model = qwen2.Qwen2(model_config(work), rngs=nnx.Rngs(0))
        embedding = model.embedder.input_embedding
        # Its own is 50 times as large as that of the others: then sampling is not random.
        embedding.value = (0.02 * embedding.value).at[EOS_ID].set(0.0)
        roles = (cluster.Role.ACTOR, cluster.Role.REFERENCE, cluster.Role.ROLLOUT)
        learner = GRPOLearner(
            rl_cluster=cluster.RLCluster(
                actor=model,
                reference=None,
                tokenizer=TokenizerAdapter(work.tokenizer()),
                cluster_config=cluster.ClusterConfig(
                    role_to_mesh=dict.fromkeys(roles, mesh),
                    rollout_engine="vanilla",
                    offload_to_cpu=False,
                    training_config=cluster.RLTrainingConfig(
                        actor_optimizer=optax.chain(
                            optax.clip_by_global_norm(1.0), optax.adamw(LEARNING_RATE)
                        ),
                        eval_every_n_steps=1000,
                        max_steps=steps,
                        mini_batch_size=work.prompts,
                        train_micro_batch_size=work.micro_batch // work.group,
                    ),
                    rollout_config=RolloutConfig(
                        max_tokens_to_generate=work.completion_length,
                        max_prompt_length=work.prompt_length,
                        kv_cache_size=work.prompt_length + work.completion_length + 8,
                        temperature=1.0,
                        top_p=1.0,
                        top_k=None,
                        eos_tokens=[EOS_ID],
                    ),
                ),
            ),
            reward_fns=reward,
            algo_config=GRPOConfig(
                num_generations=work.group, num_iterations=1, beta=0.0, epsilon=0.2
            ),
        )
        batches = [
            {"prompts": np.array(texts[(i * work.prompts) % 256 :][: work.prompts])}
            for i in range(steps)
        ]
        learner.train(batches)
    stopwatch.report(version=version("google-tunix"))


if __name__ == "__main__":
    main(work_of_command())
