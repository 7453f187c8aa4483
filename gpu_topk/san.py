import sys

import torch

sys.path[:0] = ["bench", "gpu_topk"]
import v_base as m
from kernel_cases_select import TopkSelectCase

from kpipe.runtime.host.compile import compile_kernel

torch.manual_seed(5)
case = TopkSelectCase(m)
k = compile_kernel(m.TopkSelect(), m.operands(), "sm_90a")
g = case.inputs(14, 1)
k(*g.values())
torch.cuda.synchronize()
print(g["lengths"].tolist(), case.check(g, g, 1, "low_id").wrong)
