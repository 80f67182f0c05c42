"""Peak arithmetic rates of GPUs by name, for MFU and HFU."""

from __future__ import annotations

import re

# Dense bf16 tensor-core FLOP/s in units of 1e12, from NVIDIA's data sheets (some print only twice that, the
# figure with sparsity). The first match wins, so a narrower name stands before the wider one.
PEAK_BF16_TFLOPS = (
    ("GH200", 989.4),
    ("H200 NVL", 835.5),
    ("H200", 989.4),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.5),
    ("H100", 989.4),
    ("H800 PCIe", 756.0),
    ("H800", 989.4),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A30", 165.0),
    ("A40", 149.7),
    ("A10", 125.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
)


def peak_flops(device_name: str, dtype: str = "bf16") -> float | None:
    """Return the peak dense FLOP/s of a device, or None if it is not known.

    `device_name`: as `torch.cuda.get_device_name` gives it. `dtype`: "bf16" or "fp32". There is no entry for
    fp32: its peak depends on whether TF32 is allowed.

    A slice of a device (MIG) is not known either: the name does not say how much of the arithmetic it owns.
    """
    if dtype != "bf16" or re.search(r"\bMIG\b", device_name):
        return None
    for name, tflops in PEAK_BF16_TFLOPS:
        if re.search(rf"\b{name}\b", device_name, re.IGNORECASE):
            return tflops * 1e12
    return None
