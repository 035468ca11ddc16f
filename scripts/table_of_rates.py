"""Writes the table of devices' rates into its page: `python scripts/table_of_rates.py`."""

from pathlib import Path

from generated_part import with_part

from grpo_eqx.tracking.device_links import link_rates
from grpo_eqx.tracking.device_peaks import device_peaks

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "planning.md"
KINDS = {
    "TPU v4": "TPU v4",
    "TPU v5e": "TPU v5 lite",
    "TPU v5p": "TPU v5",
    "TPU v6e": "TPU v6 lite",
    "A100 SXM 80GB": "NVIDIA A100-SXM4-80GB",
    "H100 SXM": "NVIDIA H100 80GB HBM3",
    "H200": "NVIDIA H200",
    "B200": "NVIDIA B200",
}
"""Names of devices, and JAX's for their kind."""


def with_table(page: str) -> str:
    """Returns the page with the table of rates between its two marks."""
    table = [
        "| device | bfloat16, TFLOP/s | memory, GB/s | a link, GB/s | network, GB/s |",
        "|---|---:|---:|---:|---:|",
        *(_row(name, kind) for name, kind in KINDS.items()),
    ]
    return with_part(page, "rates", "table_of_rates", "\n".join(table))


def _row(name: str, kind: str) -> str:
    peaks, links = device_peaks(kind), link_rates(kind)
    assert peaks is not None
    assert links is not None
    network = "-" if links.network is None else f"{links.network / 1e9:,.0f}"
    return (
        f"| {name} | {peaks.flops_per_second / 1e12:,.0f} | {peaks.bytes_per_second / 1e9:,.0f} "
        f"| {links.link / 1e9:,.0f} | {network} |"
    )


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
