"""The Pallas loss backend: its choice of kernels and of block sizes."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from grpo_eqx.common.errors import UserError
from grpo_eqx.common.shapes import Number
from grpo_eqx.loss_backends.base import LossBackend, TokenStats
from grpo_eqx.loss_backends.pallas.gpu import TritonKernels
from grpo_eqx.loss_backends.pallas.kernels import BlockSizes, KernelTiles, Problem
from grpo_eqx.loss_backends.pallas.tpu import MosaicKernels
from grpo_eqx.loss_backends.tiled import tiled_stats
from grpo_eqx.loss_backends.tiles import check_tiles

KERNELS = {"tpu": MosaicKernels, "gpu": TritonKernels}


class PallasLoss(LossBackend):
    """`ChunkedLoss` with a tile's logits inside kernels, which write only their sums or gradient.

    There are kernels for TPUs (Mosaic) and for GPUs (Triton). On a CPU they are interpreted, which
    is slow and meant for tests. Block sizes of `None` follow the device and the dtype; sizes that
    the device cannot run raise `UserError`.
    """

    token_tile: int = 4096
    """Maximum tokens per tile, on one device."""
    vocabulary_tile: int = 4096
    """Maximum vocabulary entries per tile."""
    token_block: int | None = None
    """Tokens per kernel block."""
    vocabulary_block: int | None = None
    """Vocabulary entries per kernel block."""
    hidden_block: int | None = None
    """Entries of the hidden states that a kernel loads at a time."""
    kernels: Literal["tpu", "gpu"] | None = None
    """Platform of the kernels. `None`: the device's, and the TPU's on a CPU."""

    def __check_init__(self) -> None:
        check_tiles(self.token_tile, self.vocabulary_tile)
        if self.kernels not in (*KERNELS, None):
            raise UserError(f"kernels is {self.kernels!r}: use {' or '.join(KERNELS)}, or None.")

    def token_stats(
        self,
        hidden: Float[Array, "*batch T H"],
        head: Float[Array, "V H"],
        ids: Int[Array, "*batch T"],
        temperature: Number,
        mesh: jax.sharding.Mesh | None,
        softcap: float | None,
    ) -> TokenStats:
        """Computes what a call returns, for ids that are all in the vocabulary.

        **Arguments:** as in `LossBackend.token_stats`. Raises `UserError` for blocks that the
        device cannot run.
        """
        device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
        tiles = self.tiles(device, hidden.shape[-1], hidden.dtype, softcap)
        return tiled_stats(hidden, head, ids, temperature, tiles, mesh)

    def tiles(
        self,
        device: jax.Device,
        hidden_size: int,
        dtype: jnp.dtype,
        softcap: float | None = None,
    ) -> KernelTiles:
        """Returns a device's kernels; raises `UserError` for blocks that it cannot run.

        **Arguments:**

        - `device`: the device.
        - `hidden_size`, `dtype`: size and dtype of hidden states.
        - `softcap`: soft cap of the logits; `None` for none.
        """
        interpret = device.platform == "cpu"
        platform = (self.kernels or "tpu") if interpret else device.platform
        if platform not in KERNELS:
            raise UserError(f"there are no kernels for {device.device_kind}: use chunked.")
        if self.kernels not in (platform, None):
            raise UserError(
                f"kernels={self.kernels!r} cannot run on {device.device_kind}: leave it None."
            )
        sizes = BlockSizes(self.token_block, self.vocabulary_block, self.hidden_block)
        kernels = KERNELS[platform](sizes, device.device_kind, interpret)
        # Block sizes that are valid for the largest tile are valid for smaller ones.
        kernels.blocks(Problem(self.token_tile, self.vocabulary_tile, hidden_size, dtype))
        return KernelTiles(self.token_tile, self.vocabulary_tile, kernels, softcap)
