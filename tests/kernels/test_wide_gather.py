"""Which cache rows the wide core's gathering warps load, and into which keys of which stage.

The code under test runs on integers, a lane at a time; addresses are those of a list and of a
cache that record what is read of them.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import kpipe.runtime.device.key_groups as compiled_groups
import kpipe.runtime.device.wide_gather as compiled_gather
from kpipe.runtime.device import wide_stages


def copy_of(module: ModuleType) -> ModuleType:
    """The module as its file has it: compiling a kernel rewrites what the kernel is made of."""
    name = f"{module.__name__}_copy"  # of the same package
    spec = importlib.util.spec_from_file_location(name, module.__file__)
    made = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


key_groups, wide_gather = copy_of(compiled_groups), copy_of(compiled_gather)
KeyGroups, WideGather = key_groups.KeyGroups, wide_gather.WideGather

ROOM = 512  # keys of a list
GROUP = wide_stages.GROUP
ROW_BYTES = 576
LANES = 4  # that share a row
WARPS = 4
ABSENT = -1


class Recorder:
    """Stands in for what a lane touches."""

    def __init__(self, monkeypatch, listed: list[int]) -> None:
        self.listed = listed
        self.converted: dict[int, dict[int, int]] = {}
        self.loaded: set[int] = set()
        self.requested: set[int] = set()
        self.events: list[tuple[str, int]] = []
        dsl = SimpleNamespace(
            range=lambda count, unroll: range(count), range_constexpr=range, min=min, max=max
        )
        monkeypatch.setattr(wide_gather, "cutlass", dsl)
        monkeypatch.setattr(key_groups, "cutlass", dsl)
        monkeypatch.setattr(wide_gather, "Int32", int)
        monkeypatch.setattr(wide_gather, "Int64", int)
        make = SimpleNamespace(
            make_rmem_tensor=lambda shape, dtype: torch.zeros(shape, dtype=torch.long),
            size=lambda t: ROOM,
        )
        monkeypatch.setattr(wide_gather, "cute", make)
        choose = SimpleNamespace(choose=lambda condition, a, b: int(a if condition else b))
        monkeypatch.setattr(wide_gather, "scalar", choose)
        rows = SimpleNamespace(
            LANES=LANES,
            load_index=lambda at: self.listed[at],
            make_feed=lambda vectors: {},
            request_row=lambda row, size, lane: self.requested.add(self.row_at(row)),
        )
        monkeypatch.setattr(wide_gather, "wide_rows", rows)
        fence = SimpleNamespace(fence_operand=lambda: self.events.append(("fence", 0)))
        monkeypatch.setattr(wide_gather, "warpgroup", fence)
        arrive = SimpleNamespace(arrive_as_warp=lambda at: self.events.append(("ready", at)))
        monkeypatch.setattr(wide_gather, "barrier", arrive)
        self.stages = SimpleNamespace(
            ready=0,
            keys=lambda order: order,
            scales_of=lambda order: None,
            wait_free=lambda order, share: self.events.append(("free", (order, share))),
        )

    def row_at(self, address: int) -> int:
        assert address % ROW_BYTES == 0
        return address // ROW_BYTES

    def fill(self, feed: dict, cache: int, index: int, lane: int) -> None:
        self.loaded.add(index)
        self.events.append(("load", index))
        feed["row"] = index

    def convert(self, feed: dict, order: int, first: int, lane: int, scales: None) -> None:
        row, key = feed.pop("row"), first + lane // LANES  # taken twice means not loaded again
        assert key not in self.converted.setdefault(order, {}), "filled twice"
        self.converted[order][key] = row
        self.events.append(("store", order))

    def run(self, count: int, splits: int, split: int, warp: int, lane: int) -> None:
        """What a lane does."""
        rows = SimpleNamespace(row_bytes=ROW_BYTES, vectors=1, fill=self.fill, convert=self.convert)
        gather, groups = WideGather(rows, WARPS), KeyGroups(splits, GROUP)
        indices = SimpleNamespace(iterator=0)
        asked = gather.ask(indices, groups, split, warp, lane)
        WideGather.fill.__wrapped__(
            gather, 0, indices, asked, count, groups, split, self.stages, warp, lane
        )


def list_of(count: int) -> list[int]:
    """A list of `count` rows, in no order."""
    return [(37 * key) % 1000 + 5 for key in range(count)] + [ABSENT] * (ROOM - count)


@pytest.mark.parametrize(
    "count, splits", [(0, 1), (1, 1), (64, 1), (65, 2), (512, 1), (512, 3), (300, 4), (130, 16)]
)
def test_every_key_gets_its_row(monkeypatch, count, splits):
    listed = list_of(count)
    for split in range(splits):
        groups = range(split, -(-count // GROUP), splits)
        filled: dict[int, dict[int, int]] = {}
        for warp, lane in itertools.product(range(WARPS), range(0, 32, LANES)):
            recorder = Recorder(monkeypatch, listed)
            recorder.run(count, splits, split, warp, lane)
            assert recorder.loaded | recorder.requested <= set(listed[:count])
            for order, keys in recorder.converted.items():
                assert not filled.setdefault(order, {}).keys() & keys.keys()
                filled[order].update(keys)
        assert list(filled) == list(range(len(groups)))
        for order, group in enumerate(groups):
            assert sorted(filled[order]) == list(range(GROUP))
            for key, row in filled[order].items():
                assert group * GROUP + key >= count or row == listed[group * GROUP + key]


def test_no_load_is_under_way_at_a_fence(monkeypatch):
    """The fence would wait for it, and the group with it; stages are waited for before stores."""
    recorder = Recorder(monkeypatch, list_of(ROOM))
    warp = 1
    recorder.run(ROOM, 1, 0, warp, 8)
    assert sorted(recorder.converted[0]) == [key for key in range(64) if key // 16 == warp][2::8]
    order, stored, loads = 0, 0, 0
    for event, at in recorder.events:
        if event == "load":
            loads += 1
        elif event == "free":
            assert at == (order - wide_stages.COUNT, warp), "keys 16 w.. belong to warp w"
        elif event == "store":
            assert at == order
            stored += 1
        elif event == "fence":
            assert stored == loads, "what is loaded has been stored"
        else:
            assert at == order % wide_stages.COUNT
            order += 1
    frees = [at[0] for event, at in recorder.events if event == "free"]
    assert frees == list(range(order - wide_stages.COUNT))
    assert order == ROOM // GROUP
