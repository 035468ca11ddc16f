"""GRPO in JAX that you can trust, in a few lines, from a laptop to a TPU pod."""

import logging
import sys
from typing import TYPE_CHECKING

from grpo_eqx.common import errors as errors
from grpo_eqx.common.errors import UserError as UserError
from grpo_eqx.common.lazy import lazy_names
from grpo_eqx.common.tracebacks import shortened
from grpo_eqx.distributed.tpu_runtime import leave_out_libtpu
from grpo_eqx.settings import recipes as recipes
from grpo_eqx.settings.config import GRPOConfig as GRPOConfig
from grpo_eqx.settings.unknown_names import advice_on_call

if TYPE_CHECKING:
    from grpo_eqx import cli as cli
    from grpo_eqx.evaluation.result import Evaluation as Evaluation
    from grpo_eqx.loop.callbacks import Callback as Callback
    from grpo_eqx.loop.callbacks import EarlyStop as EarlyStop
    from grpo_eqx.loop.callbacks import Event as Event
    from grpo_eqx.loop.callbacks import Response as Response
    from grpo_eqx.loop.callbacks import RunView as RunView
    from grpo_eqx.loop.fit_result import FitResult as FitResult
    from grpo_eqx.loss_backends.logits_loss import grpo_loss as grpo_loss
    from grpo_eqx.trainer import GRPOTrainer as GRPOTrainer

__all__ = [
    "Callback", "EarlyStop", "Evaluation", "Event", "FitResult", "GRPOConfig", "GRPOTrainer",
    "Response", "RunView", "UserError", "errors", "grpo_loss", "recipes",
]  # fmt: skip
__version__ = "0.1.0"
sys.excepthook = shortened(sys.excepthook, advice_on_call)
leave_out_libtpu()
# Its tokenizers and chat templates need no torch, which it would say at every start.
logging.getLogger("transformers").addFilter(lambda x: "PyTorch was not found" not in str(x.msg))
__getattr__ = lazy_names(
    __name__,
    {
        "Callback": "grpo_eqx.loop.callbacks",
        "EarlyStop": "grpo_eqx.loop.callbacks",
        "Event": "grpo_eqx.loop.callbacks",
        "Response": "grpo_eqx.loop.callbacks",
        "RunView": "grpo_eqx.loop.callbacks",
        "Evaluation": "grpo_eqx.evaluation.result",
        "FitResult": "grpo_eqx.loop.fit_result",
        "GRPOTrainer": "grpo_eqx.trainer",
        "grpo_loss": "grpo_eqx.loss_backends.logits_loss",
    },
)
