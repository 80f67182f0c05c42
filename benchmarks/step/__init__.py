"""Training steps, measured side by side.

measure     the command: ratios of whole steps, parts and kernels
contenders  the engines that take part, and their turns
plain_gpt   the peer in plain PyTorch
parts       the time by part and by kernel

Whoever imports from here need not call `prepare_imports`.
"""

from megatron_patches.engine.compat import prepare_imports

prepare_imports()
