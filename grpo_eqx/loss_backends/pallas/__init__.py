"""Loss backend with Pallas kernels."""

from grpo_eqx.loss_backends.pallas.backend import PallasLoss as PallasLoss
