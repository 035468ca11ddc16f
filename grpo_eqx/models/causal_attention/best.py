"""Choice of the best attention over whole sequences for a kind of device."""

import jax

from grpo_eqx.models.causal_attention.base import CausalAttention
from grpo_eqx.models.causal_attention.blocked import BlockedAttention
from grpo_eqx.models.causal_attention.cudnn import CudnnAttention
from grpo_eqx.models.causal_attention.mosaic_tpu import MosaicAttention

# Fits well in a core's cache: 128 took up to 1.8 times as long, 256 up to 3 times.
_CPU_BLOCK = 64
# XLA shares the products of 4 x 4 blocks out among cores. Layers after prompts of 512 tokens took
# 0.83 times as long; those after prompts that fill no wide block, up to 1.05 times.
_CPU_WIDE = 4
_FIRST_WITH_FLASH_ATTENTION = 8.0  # compute capability


def best_attention(mesh: jax.sharding.Mesh, max_prompt_length: int) -> CausalAttention:
    """Selects the devices' own kernels where there are any, or blocks in plain JAX.

    **Arguments:** the devices; the tokens of the longest prompt.
    """
    device = mesh.devices.flat[0]
    if device.platform == "tpu":
        return MosaicAttention(mesh)
    if device.platform == "cpu":
        fills_wide = max_prompt_length >= _CPU_WIDE * _CPU_BLOCK
        return BlockedAttention(_CPU_BLOCK, _CPU_WIDE if fills_wide else 1)
    is_nvidia = "NVIDIA" in device.device_kind
    if is_nvidia and float(device.compute_capability) >= _FIRST_WITH_FLASH_ATTENTION:
        return CudnnAttention(mesh)
    return BlockedAttention()
