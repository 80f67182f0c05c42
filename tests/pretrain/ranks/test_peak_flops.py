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
    ],
)
def test_known_devices(name: str, tflops: float) -> None:
    assert peak_flops(name) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    "name",
    [
        "cpu",
        "NVIDIA A10G",
        "Tesla V100-SXM2-32GB",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "NVIDIA H1000",
    ],
)
def test_unknown_devices_have_no_peak(name: str) -> None:
    assert peak_flops(name) is None


def test_there_is_no_peak_for_fp32() -> None:
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp32") is None
