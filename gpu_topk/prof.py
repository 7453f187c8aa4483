
import importlib.util, sys, torch
sys.path.insert(0, "bench"); sys.path.insert(0, "gpu_topk")
from kernel_cases_select import TopkSelectCase
from kpipe.runtime.host.compile import compile_kernel
import prof_kernel as m
case = TopkSelectCase(m)
for parts in (8, 2):
    k = compile_kernel(m.TopkSelect(parts=parts), m.operands(), "sm_90a")
    for L in (8192, 131072):
        sets = [case.inputs(1, 1, L) for _ in range(4)]
        for rep in range(3):
            for g in sets: k(*g.values())
            torch.cuda.synchronize()
        v = sets[1]["selected"][0, :22].tolist()
        print(parts, L, "t0 wait vis", v[:3], "rounds", [[b - a for a, b in zip(v[i:i+4], v[i+1:i+5])] for i in (3, 8, 13)], "end", v[18:22])
