import importlib, sys, torch
sys.path.insert(0, "bench")
from kernel_cases_select import TopkSelectCase
from kpipe.runtime.host.compile import compile_kernel
m = importlib.import_module("kpipe.generated.dsa_tp.kernels.topk_select")
case = TopkSelectCase(m)
k = compile_kernel(m.TopkSelect(), m.operands(), "sm_90a")
g = case.inputs(13, 1); k(*g.values()); torch.cuda.synchronize(); print(case.check(g, g, 1).wrong)
