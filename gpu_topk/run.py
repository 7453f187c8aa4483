import importlib
import sys
import time

import torch

sys.path[:0] = ["bench", "gpu_topk"]
from kernel_cases_select import TopkSelectCase

from kpipe.runtime.host.compile import compile_kernel

torch.manual_seed(3)
t0 = time.time()


def comp(m, **f):
    return compile_kernel(m.TopkSelect(**f), m.operands(), "sm_90a")


def verify(m, flags, todo):
    case = TopkSelectCase(m)
    k = comp(m, **flags)
    bad = 0
    n = 0
    for rows, q in todo:
        given = case.inputs(rows, q)
        k(*given.values())
        torch.cuda.synchronize()
        v = case.check(given, given, q, flags.get("tie", "low_id"))
        n += rows
        if v.wrong:
            bad += len(v.wrong)
            print("WRONG", m.__name__, flags, rows, q, v.wrong[:4], flush=True)
    print(m.__name__, flags, "rows", n, "bad", bad, f"{time.time() - t0:.0f}s", flush=True)


base = importlib.import_module("v_base")
mode = sys.argv[1]
for flags in () if mode != "time" else ({}, {"tie": "high_id", "parts": 4}, {"parts": 2}):
    verify(base, flags, ((15, 1), (64, 1), (64, 4)))
small = TopkSelectCase(base)


def sets_of(rows, length):
    n = 16 if rows * length < 3e6 else 6
    return [list(small.inputs(rows, 1, length).values()) for _ in range(n)]


def timed(k, sets):
    k(*sets[0])
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for s in sets:
            k(*s)
    ts = []
    for _ in range(9):
        a = torch.cuda.Event(enable_timing=True)
        b = torch.cuda.Event(enable_timing=True)
        a.record()
        g.replay()
        b.record()
        torch.cuda.synchronize()
        ts.append(a.elapsed_time(b) * 1000 / len(sets))
    ts.sort()
    return ts[len(ts) // 2]


p = importlib.import_module("prof")
names = [
    "t0",
    "wait",
    "count0",
    "count1",
    "spread",
    "meet1",
    "found",
    "listed",
    "sent",
    "meet2",
    "ranked",
    "emitted",
    "-",
    "counted",
    "bin",
]
for parts in () if mode != "prof" else (8, 2):
    k = comp(p, parts=parts)
    for L in (8192, 32768, 131072) if parts == 8 else (32768, 131072):
        sets = [small.inputs(16, 1, L) for _ in range(3)]
        for rep in range(2):
            for g in sets:
                k(*g.values())
            torch.cuda.synchronize()
        print("prof", parts, L, dict(zip(names, sets[1]["selected"][3, :15].tolist())), flush=True)
if mode != "time":
    sys.exit()
which = ["v_base:8,4,2", "v_thr512:8,4", "v_alone4k:8,2", "v_alone32k:2"]
kernels = {}
for w in which:
    name, parts = w.split(":")
    m = importlib.import_module(name)
    for q in parts.split(","):
        kernels[name, int(q)] = comp(m, parts=int(q))
print(f"compiled {time.time() - t0:.0f}s", flush=True)
for length in (8192, 131072, 32768, 16384, 2048, 65536, 4096):
    table = {key: [] for key in kernels}
    for rows in (1, 4, 16, 32, 64):
        sets = sets_of(rows, length)
        for key, k in kernels.items():
            table[key].append(timed(k, sets))
        del sets
    for key, v in table.items():
        print(
            f"{length:7d} {key[0]:11s} parts {key[1]}",
            " ".join(f"{x:6.1f}" for x in v),
            f"{time.time() - t0:.0f}s",
            flush=True,
        )
