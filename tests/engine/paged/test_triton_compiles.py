"""Triton's kernels compile to machine code of GPUs, which needs none: types, shapes of products, memory on the chip.

Only where triton is installed; numbers are tested in `test_attention.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
import torch
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from paceline.engine.paged.attention import triton_kernels

formats = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
types = dict.fromkeys(("query", "keys", "values", "output")) | dict.fromkeys(("partial", "norms"), "*fp32")
types |= dict.fromkeys(("items", "pool"), "*i32")
types |= {"positions": "*i64", "splits": "*i32", "scale": "fp32", "softcap": "fp32"}
made = []
for arch, dtype, dim, group, height, window, has_softcap in json.loads(sys.argv[1]):
    constants = dict(
        GROUP=group, KEY_DIM=dim, VALUE_DIM=dim, KEY_PADDED=dim, VALUE_PADDED=dim, BLOCK=16, HEIGHT=height,
        COLUMNS=triton_kernels.columns(formats[dtype], dim), WINDOW=window, HAS_SOFTCAP=has_softcap,
        PRECISION="ieee" if dtype == "fp32" else "tf32",
    )
    for kernel in (triton_kernels.attend_kernel, triton_kernels.combine_kernel):
        names = kernel.arg_names
        signature = {name: "constexpr" if name.isupper() else types.get(name, "i32") or f"*{dtype}" for name in names}
        known = {(at,): constants[name] for at, name in enumerate(names) if name.isupper()}
        aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if signature[name][0] in "*i"}
        aligned.pop((names.index("heads"),))
        source = ASTSource(kernel, signature, known, aligned)
        binary = compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 4, "num_stages": 2})
        made.append({"shared": binary.metadata.shared, "cubin": len(binary.asm["cubin"]), "ptx": binary.asm["ptx"]})
print(json.dumps(made))
"""
SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10}  # bytes that a program may have, by architecture

CASES = [  # architecture, type, dimension, query heads of a head of K and V, height of a tile, window, softcap
    (80, "bf16", 128, 7, 16, 0, False),
    (90, "bf16", 128, 7, 64, 0, False),
    (89, "fp16", 256, 2, 64, 4096, True),
    (86, "fp32", 128, 4, 64, 0, False),
]


def test_kernels_compile_for_gpus() -> None:
    pytest.importorskip("triton", reason="triton is not installed: its kernels cannot be compiled")
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", SCRIPT, json.dumps(CASES)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    for (arch, dtype, *_), attend, combine in zip(CASES, made[::2], made[1::2], strict=True):
        assert attend["cubin"] and combine["cubin"]
        assert attend["shared"] <= SHARED[arch]
        assert "cp.async" in attend["ptx"], "K and V are read ahead"
        if dtype != "fp32":
            assert "mma" in attend["ptx"], "products run on tensor cores"
