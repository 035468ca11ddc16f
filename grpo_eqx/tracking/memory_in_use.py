"""Memory that a run takes, in words."""

import jax

from grpo_eqx.tracking.memory import peak_resident_bytes

_GIB = 2**30


def memory_in_use() -> tuple[str, str]:
    """Returns whose memory is known, and how much of it has been in use at most.

    That of the device of this process that has used the most, where devices report it; else the
    process' own.
    """
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [(each["peak_bytes_in_use"], each) for each in stats if "peak_bytes_in_use" in each]
    if peaks:
        peak, of = max(peaks, key=lambda pair: pair[0])
        limit = of.get("bytes_limit")
        return "memory", f"{peak / _GIB:.1f}" + (f"/{limit / _GIB:.0f} GiB" if limit else " GiB")
    return "RAM", f"{peak_resident_bytes() / _GIB:.1f} GiB"
