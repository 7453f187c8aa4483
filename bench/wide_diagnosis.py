"""Which part of the wide core's merge is wrong: inputs whose every result names its key.

Key j has a single value, 1 in column `column_of(j)`, so a head's result there is the key's share of
the softmax, and 0 elsewhere. Scores come from one position column: even heads ask with 0 (equal
shares), odd heads with 1; a key's level there is some power of two of its own, and one CTA's keys
lie LIFT powers above the others.

A wrong mass shows as one ratio for all CTAs, a wrong factor as another ratio in one of them, wrong
keys or columns as scattered ratios or values where 0 is due, lost sums as zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import e, log, log2
from types import ModuleType

import torch
from torch import Tensor

SPLITS = 2
COUNTS = (64, 65, 128, 129, 256)
STEP = 3  # columns from one key to the next; odd, so that 512 keys have a column each
LIFT = 3
LEVELS = 5  # of neighbouring keys, half a power apart
CLOSE = 2.0**-7
ONE_E4M3 = 0x38
SCALE_GROUP = 128


def column_of(key: Tensor, columns: int) -> Tensor:
    """Where a key has its value."""
    return key * STEP % columns


def source_of(key: Tensor, group: int) -> Tensor:
    """The CTA that takes a key."""
    return key // group % SPLITS


def level(module: ModuleType, key: Tensor, lifted: int) -> Tensor:
    """What keys have in their first position column; exact in E4M3 and BF16."""
    return LIFT * (source_of(key, module.GROUP) == lifted) + key % LEVELS / 2


def asked(module: ModuleType) -> float:
    """What odd heads have there: with the scale of softmax it makes a level one power of two."""
    if module.ROWS.query_dtype == "u8":
        return 1.0  # q_scale does it
    return float(torch.tensor(1 / (module.SOFTMAX_SCALE * log2(e))).bfloat16())


def scores(module: ModuleType, count: int, lifted: int) -> Tensor:
    """Binary logarithms of every head's weights, [HEADS, count], in float64."""
    unit = 1.0
    if module.ROWS.query_dtype != "u8":
        unit = asked(module) * module.SOFTMAX_SCALE * log2(e)
    odd = torch.arange(module.HEADS)[:, None] % 2
    return odd * level(module, torch.arange(count), lifted).double() * unit


def cache_rows(module: ModuleType, count: int, lifted: int) -> Tensor:
    """Bytes of the keys, [count, row_bytes]."""
    latent, key = module.KV_LORA, torch.arange(count)
    codes = torch.zeros(count, latent, dtype=torch.uint8)
    codes[key, column_of(key, latent)] = ONE_E4M3
    position = torch.zeros(count, module.PE)
    position[:, 0] = level(module, key, lifted)
    if module.ROWS.query_dtype == "u8":
        return torch.cat([codes, position.to(torch.float8_e4m3fn).view(torch.uint8)], 1)
    scales = torch.ones(count, latent // SCALE_GROUP).view(torch.uint8)
    return torch.cat([codes, scales, position.bfloat16().view(torch.uint8)], 1)


def queries(module: ModuleType) -> Tensor:
    """[1, HEADS, KV_LORA + PE] in the dtype of the operand."""
    query = torch.zeros(1, module.HEADS, module.KV_LORA + module.PE)
    query[:, 1::2, module.KV_LORA] = asked(module)
    if module.ROWS.query_dtype == "u8":
        return query.to(torch.float8_e4m3fn).view(torch.uint8)
    return query.bfloat16()


def operands(module: ModuleType, count: int, lifted: int) -> dict[str, Tensor]:
    """A launch's tensors, on the GPU; the list names its keys backwards in the cache."""
    pages = -(-count // module.PAGE)
    cache = torch.zeros(pages * module.PAGE, module.ROWS.row_bytes, dtype=torch.uint8)
    places = torch.arange(count).flip(0)
    cache[places] = cache_rows(module, count, lifted)
    selected = torch.full((1, module.TOP_K), -1, dtype=torch.int32)
    selected[0, :count] = places
    unit = 1 / (module.SOFTMAX_SCALE * log2(e))  # q_scale, of E4M3 queries only
    tensors = (
        cache.view(pages, module.PAGE, -1),
        selected,
        torch.tensor([count], dtype=torch.int32),
        torch.tensor([unit]),
        torch.ones(1),
        queries(module),
        torch.full((1, module.HEADS, module.KV_LORA), torch.nan).bfloat16(),
        torch.full((1, module.HEADS), torch.nan),
    )
    names = [spec.name for spec in module.operands()]
    return {name: tensor.cuda() for name, tensor in zip(names, tensors, strict=False)}


def findings(module: ModuleType, actual: Tensor, expected: Tensor) -> Iterator[str]:
    """A line a source CTA and kind of head.

    `actual` are results, [HEADS, KV_LORA], `expected` shares, [HEADS, count].
    """
    key = torch.arange(expected.shape[1])
    columns, source = column_of(key, module.KV_LORA), source_of(key, module.GROUP)
    ratio = actual[:, columns].double() / expected
    for cta in range(SPLITS):
        for kind, name in enumerate(("even", "odd")):
            mine = ratio[kind::2, source == cta]
            if not mine.numel():
                continue
            wrong = (mine - 1).abs().nan_to_num(torch.inf) > CLOSE
            spread = ", ".join(f"{part:.4g}" for part in (mine.min(), mine.median(), mine.max()))
            text = f"CTA {cta}, {name} heads: {int(wrong.sum())} of {wrong.numel()} shares wrong"
            if wrong.any():
                head, place = wrong.nonzero()[0].tolist()
                at = key[source == cta][place]
                text += f", first head {2 * head + kind} key {int(at)}"
            yield f"{text}; actual over expected: least, median, most {spread}"
    empty = torch.ones(module.KV_LORA, dtype=torch.bool)
    empty[columns] = False
    stray = (actual != 0) & empty
    if stray.any():
        head, column = stray.nonzero()[0].tolist()
        value = actual[head, column].item()
        first = f"first head {head} column {column}: {value}"
        yield f"{int(stray.sum())} values where 0 is due, {first}"


def diagnose(module: ModuleType, kernel) -> None:
    """Prints what a compiled kernel with SPLITS splits makes of every list."""
    for count in COUNTS:
        for lifted in range(SPLITS):
            given = operands(module, count, lifted)
            kernel(*given.values())
            torch.cuda.synchronize()
            outputs = [tensor[0].cpu() for tensor in list(given.values())[6:]]
            print(f"{count} keys, those of CTA {lifted} lifted")
            weights = scores(module, count, lifted)
            for line in findings(module, outputs[0], torch.softmax(weights * log(2), 1)):
                print(f"    {line}")
            if len(outputs) > 1:
                expected = torch.logsumexp(weights * log(2), 1) / log(2)
                worst = (outputs[1].double() - expected).abs().max().item()
                print(f"    LSE: off by at most {worst:.3g}")
