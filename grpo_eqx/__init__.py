"""GRPO in JAX that you can trust, in a few lines, from a laptop to a TPU pod."""

import sys
from typing import TYPE_CHECKING

from grpo_eqx import recipes as recipes
from grpo_eqx._lazy import lazy_names
from grpo_eqx.config import GRPOConfig as GRPOConfig
from grpo_eqx.errors import UserError as UserError
from grpo_eqx.tracebacks import shortened

if TYPE_CHECKING:
    from grpo_eqx import cli as cli
    from grpo_eqx.evaluation import Evaluation as Evaluation
    from grpo_eqx.loss_backends.logits_loss import grpo_loss as grpo_loss
    from grpo_eqx.trainer import FitResult as FitResult
    from grpo_eqx.trainer import GRPOTrainer as GRPOTrainer

__all__ = [
    "Evaluation", "FitResult", "GRPOConfig", "GRPOTrainer", "UserError", "grpo_loss", "recipes"
]  # fmt: skip
__version__ = "0.1.0"
sys.excepthook = shortened(sys.excepthook)
__getattr__ = lazy_names(
    __name__,
    {
        "Evaluation": "grpo_eqx.evaluation",
        "FitResult": "grpo_eqx.trainer",
        "GRPOTrainer": "grpo_eqx.trainer",
        "grpo_loss": "grpo_eqx.loss_backends.logits_loss",
    },
)
