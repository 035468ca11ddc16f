"""Times steps of TRL with transformers generation, for step.py: python trl_worker.py WORK."""

import os
import tempfile
from pathlib import Path
from typing import Any

os.environ["WANDB_MODE"] = "disabled"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
import trl
from datasets import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from work import EOS_ID, LEARNING_RATE, PAD_ID, Stopwatch, Work, work_of_command
from work import reward as reward_of_texts


class Watch(TrainerCallback):
    def __init__(self, stopwatch: Stopwatch):
        self.stopwatch = stopwatch

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.stopwatch.step_ends()


def main(work: Work, folder: Path) -> None:
    cuda = torch.cuda.is_available()
    tokenizer = work.tokenizer()
    tokenizer.padding_side = "left"
    torch.manual_seed(0)
    config = Qwen2Config(
        **work.model_config(), eos_token_id=EOS_ID, pad_token_id=PAD_ID, bos_token_id=None
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.get_input_embeddings().weight[EOS_ID] = 0
    model.generation_config.eos_token_id = EOS_ID
    model.generation_config.pad_token_id = PAD_ID
    stopwatch = Stopwatch(work)

    def reward(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> Any:
        stopwatch.lengths.append(sum(map(len, completion_ids)) / len(completion_ids))
        return reward_of_texts(completions)

    args = GRPOConfig(
        output_dir=str(folder),
        use_cpu=not cuda,
        bf16=cuda,
        fp16=False,
        per_device_train_batch_size=work.micro_batch,
        gradient_accumulation_steps=work.prompts * work.group // work.micro_batch,
        num_generations=work.group,
        max_completion_length=work.completion_length,
        beta=0.0,
        max_steps=work.warmup_steps + work.steps,
        report_to=[],
        save_strategy="no",
        gradient_checkpointing=False,
        learning_rate=LEARNING_RATE,
        temperature=1.0,
        top_k=0,  # with None transformers takes the 50 likeliest
        disable_tqdm=True,
    )
    GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": work.texts()}),
        processing_class=tokenizer,
        callbacks=[Watch(stopwatch)],
    ).train()
    stopwatch.report(version=trl.__version__)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(work_of_command(), Path(folder))
