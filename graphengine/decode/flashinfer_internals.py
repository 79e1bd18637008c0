"""Every private name of FlashInfer that we use; the like of capture/torch_internals.py.

Seen in 0.6.12 and 0.7.2.post1. tests/decode/test_flashinfer_internals.py asks FlashInfer's own
`plan` what it would load, so a version that does otherwise is noticed there.
"""

from typing import Any

import torch


def planned_module(dtype: torch.dtype, head_dim: int, windowed: bool) -> Any:
    """The module that fa2's `plan` loads for `FlashInferAttention`'s arguments; not built yet.

    0.7 loads one for keys and values of equal strides, by a private generator; what its public one
    makes is another, which nobody would load. 0.6.12 loads the public one's. Public: none.
    """
    from flashinfer import prefill

    generate = getattr(prefill, "_gen_batch_prefill_primary_module", None)
    generate = generate or prefill.gen_batch_prefill_module
    # No positional encoding of its own, soft cap or fp16 products, as in `plan`.
    types = (*[dtype] * 3, torch.int32)
    return generate("fa2", *types, head_dim, head_dim, 0, windowed, False, False)


def build(module: Any) -> None:
    """Compiles a module that is not built yet, in a subprocess, under the lock that its loader
    waits for: 0.6.12 takes it unless told not to, 0.7 only when told. Public: none."""
    if not module.is_aot:
        module.build(verbose=False, need_lock=True)
