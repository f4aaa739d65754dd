"""How the C library hands out memory: large blocks are kept for the next layer.

By default glibc gives every large block back to the system and asks for it again, page by page:
on ResNet-50 a third of the time of `prune` went there. Only the program does this, never the
library: a process that imports dcptool keeps its own ways.
"""

from __future__ import annotations

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
BLOCK_BYTES = 1 << 30
SPARE_BYTES = (1 << 31) - 1


def keep_large_blocks() -> bool:
    """Tell glibc; False where there is none, or where the user has told it something else."""
    told = any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ
    if sys.platform != "linux" or told:
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, BLOCK_BYTES) and mallopt(M_TRIM_THRESHOLD, SPARE_BYTES))
