import importlib, sys, time, torch
sys.path.insert(0, "bench")
from kernel_cases_select import TopkSelectCase
from kpipe.runtime.host.compile import compile_kernel
m = importlib.import_module("kpipe.generated.dsa_tp.kernels.topk_select")
case = TopkSelectCase(m)
torch.manual_seed(3)
def comp(**f): return compile_kernel(m.TopkSelect(**f), m.operands(), "sm_90a")
bad = 0
for flags in ({}, {"tie": "high_id"}, {"parts": 4}, {"parts": 2}):
    k = comp(**flags)
    for rows, q in ((1,1),(13,1),(64,1),(16,4),(64,4)):
        for rep in range(2):
            given = case.inputs(rows, q)
            done = given
            k(*given.values()); torch.cuda.synchronize()
            v = case.check(given, done, q, flags.get("tie", "low_id"))
            if v.wrong: bad += 1; print(flags, rows, q, v.wrong[:3])
print("bad", bad)
def timed(k, rows, length, n=20):
    sets = [list(case.inputs(rows, 1, length).values()) for _ in range(n if rows*length*4*n < 3e9 else 6)]
    k(*sets[0]); torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for s in sets: k(*s)
    ts=[]
    for _ in range(30):
        a=torch.cuda.Event(enable_timing=True); b=torch.cuda.Event(enable_timing=True)
        a.record(); g.replay(); b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b)*1000/len(sets))
    ts.sort(); return ts[len(ts)//2]
for parts in (8,4,2):
    for pdl in (True,):
        k = comp(parts=parts, pdl=pdl, release=pdl)
        for length in (2048, 8192, 32768, 131072):
            print("parts", parts, "pdl", pdl, length, " ".join(f"{r}:{timed(k,r,length):.1f}" for r in (1,4,16,64)), flush=True)
