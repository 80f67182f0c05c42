"""Peak rates of devices by the names that CUDA gives them."""

from __future__ import annotations

import pytest

from pretrain.ranks.devices import peak_flops


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA A10", 125),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("cpu", None),
        ("NVIDIA A10G", None),
        ("Tesla V100-SXM2-32GB", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("NVIDIA H1000", None),
    ],
)
def test_peaks_in_bf16_of_devices_that_are_known(name: str, tflops: float | None) -> None:
    assert peak_flops(name) == (None if tflops is None else pytest.approx(tflops * 1e12))
    assert peak_flops(name, "fp32") is None
