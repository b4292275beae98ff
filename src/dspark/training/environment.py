"""Process settings that torch on a CPU trains several times faster with."""

import os
import sys

import torch

SETTINGS = {
    # glibc gives every large temporary back to the system and faults it in again; keep them.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "20000000000",
    # Spinning threads slow everybody down as soon as the cores have another user.
    "OMP_WAIT_POLICY": "passive",
}


def reexec_with_settings() -> None:
    """Start this program again with SETTINGS, unless the environment names all of them already.

    They are read when a process starts, so they cannot be set from inside. Call first thing.
    """
    if not SETTINGS.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**SETTINGS, **os.environ})


def allow_fast_products() -> None:
    """Multiply fp32 matrices in bf16 with fp32 sums where the CPU can (AMX, AVX-512); weights,
    activations and moments stay fp32. Holds for the whole process."""
    torch.set_float32_matmul_precision("medium")
