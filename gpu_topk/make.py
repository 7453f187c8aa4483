"""Variants and the profile of the generated kernel as files."""

s = open("generated/dsa_tp/kernels/topk_select.py").read()


def put(name, *pairs):
    t = s
    for a, b in pairs:
        assert a in t, a
        t = t.replace(a, b)
    open(f"gpu_topk/{name}.py", "w").write(t)


A = "ALONE = 16384"
put("v_base")
put("v_alone4k", (A, "ALONE = 4096"))
put("v_alone32k", (A, "ALONE = 32768"))
put("v_thr512", ("THREADS = 1024", "THREADS = 512"), ("min(65536, THREADS * PAGE)", "65536 // 2"))
st = lambda n: f"        _stamp(shared, {n})\n"
f = """
def _stamp(shared, number):
    shared.stamps[cute.arch.warp_idx() * 0 + number] = Uint32(cute.arch.clock())

"""
put(
    "prof",
    ("@dataclass(frozen=True)\nclass TopkSelect", f + "@dataclass(frozen=True)\nclass TopkSelect"),
    ("    last: cute.Tensor  #", "    stamps: cute.Tensor\n    last: cute.Tensor  #"),
    (
        "            last=words(1, Uint64),",
        "            stamps=words(16),\n            last=words(1, Uint64),",
    ),
    ("        pdl.wait()\n", st(0) + "        pdl.wait()\n" + st(1)),
    (
        "        self._count_digits(parts, share, shared)\n",
        st(2) + "        self._count_digits(parts, share, shared)\n" + st(3),
    ),
    (
        "        above, count = shared.found[1], shared.found[2]\n",
        st(6) + "        above, count = shared.found[1], shared.found[2]\n",
    ),
    ("        histogram.share(", st(13) + "        histogram.share("),
    (
        "        self._meet(parts)\n        if cute.arch.warp_idx() == 0:\n            histogram",
        st(4)
        + "        self._meet(parts)\n"
        + st(5)
        + "        if cute.arch.warp_idx() == 0:\n            histogram",
    ),
    (
        "        cute.arch.sync_threads()\n        self._send",
        st(7) + "        cute.arch.sync_threads()\n        self._send",
    ),
    (
        "        if self.release:\n            pdl.release()\n        self._meet(parts)  #",
        st(8) + "        if self.release:\n            pdl.release()\n        self._meet(parts)  #",
    ),
    ("        self._rank(part", st(9) + "        self._rank(part"),
    ("        self._emit(share", st(10) + "        self._emit(share"),
)
t = open("gpu_topk/prof.py").read()
i = t.index("        self._emit(share, listed")
j = t.index("\n", i) + 1
t = (
    t[:j]
    + st(11)
    + """        if cute.arch.thread_idx()[0] == 0 and part == 0:
            for q in cutlass.range_constexpr(14):
                targets[q] = Int32(shared.stamps[q] - shared.stamps[0])
            targets[14] = Int32(shared.found[2])
"""
    + t[j:]
)
open("gpu_topk/prof.py", "w").write(t)
