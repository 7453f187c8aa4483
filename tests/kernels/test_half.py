"""Codes that come to F16, run on the CPU from the PTX of a small kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kernel_files import load
from ptx_machine import Launch, packed, parse, run

from kpipe.runtime.host.compile import compile_kernel, ptx_of

KERNEL = '''
"""Two words of pairs for every word of codes."""

from dataclasses import dataclass

from cutlass import Uint32, cute

from kpipe.runtime.device import half
from kpipe.runtime.host.compile import TensorSpec


def operands():
    return (TensorSpec("codes", "i32", (64,)), TensorSpec("pairs", "i32", (64, 2)))


@dataclass(frozen=True)
class Convert:
    by: str

    @cute.jit
    def __call__(self, codes: cute.Tensor, pairs: cute.Tensor, stream):
        self.convert(codes, pairs).launch(grid=[1, 1, 1], block=[64, 1, 1], stream=stream)

    @cute.kernel
    def convert(self, codes: cute.Tensor, pairs: cute.Tensor):
        thread = cute.arch.thread_idx()[0]
        words = cute.recast_tensor(codes, Uint32)
        made = getattr(half, self.by)(words[thread])
        target = cute.recast_tensor(pairs, Uint32)
        target[thread, 0], target[thread, 1] = made
'''


def converted(folder: Path, by: str) -> torch.Tensor:
    """F16 (word, pair, element) of all 256 codes in order, four a word."""
    path = folder / "convert.py"
    path.write_text(KERNEL)
    module = load(path)
    kernel = compile_kernel(module.Convert(by), module.operands(), "sm_90a", keep_ptx=True)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.int32)
    pairs = torch.zeros(64, 2, dtype=torch.int32)
    operands = [(codes, []), (pairs, [])]
    run([Launch(parse(ptx_of(kernel)), (1, 1, 1), packed(operands), [codes, pairs])])
    return pairs.view(torch.float16).view(64, 2, 2)


@pytest.mark.parametrize(
    ("by", "order"),
    [("widen_e4m3", [[0, 1], [2, 3]]), ("widen_interleaved", [[0, 2], [1, 3]])],
)
def test_every_code_is_exact(tmp_path, by, order):
    made = converted(tmp_path, by).double()
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().view(64, 4)
    expected = codes[:, torch.tensor(order)]
    numbers = ~expected.isnan()
    assert numbers.sum() == 254
    assert torch.equal(made[numbers], expected[numbers])
    assert made[~numbers].isnan().all(), "NaN codes stay NaN"
