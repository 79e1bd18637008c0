import re

from graphengine.kernels import moe_mxfp4_stream as st
from tests.kernels.test_compiles_for_sm90 import *
from tests.support.kernel_launches import *


def test_it(compiled):
    T, E, I, D, K = 8, 32, 2880, 2880, 4
    blocks = (E, 2 * I // 64, D // 64), (E, D // 64, I // 64)
    both = [
        mxfp4.Mxfp4(empty(*n, mxfp4.BYTES, dtype=U8), empty(*n, mxfp4.SCALES, dtype=U8))
        for n in blocks
    ]
    weight, slots, pairs = moe_kernels.launch_route(empty(T, E), K, True)[1:]
    compiled.clear()
    for warps in (4, 8):
        act = st.launch_gate_up(
            empty(T, D), both[0], slots, pairs, K, empty(E, 2 * I), (1.7, 7.0), num_warps=warps
        )
        st.launch_down(act, both[1], weight, slots, pairs, empty(E, D), num_warps=warps)
    for k in compiled:
        ptx = k.asm["ptx"]
        print(
            k.name,
            k.metadata.num_warps,
            "shared",
            k.metadata.shared,
            "regs",
            getattr(k, "n_regs", None),
            "wgmma",
            ptx.count("wgmma.mma_async"),
            "st.shared",
            len(re.findall(r"st\.shared|stmatrix", ptx)),
            "ld.shared",
            len(re.findall(r"ld\.shared|ldmatrix", ptx)),
            "shfl",
            ptx.count("shfl"),
            "bar",
            ptx.count("bar.sync"),
            "ld.global",
            re.findall(r"ld\.global[\w.:]*", ptx)[:60].__len__(),
        )
        print(sorted(set(re.findall(r"ld\.global[\w.:]*", ptx))))
        open(f"/tmp/{k.name}_{k.metadata.num_warps}.ptx", "w").write(ptx)
        open(f"/tmp/{k.name}_{k.metadata.num_warps}.cubin", "wb").write(k.asm["cubin"])
