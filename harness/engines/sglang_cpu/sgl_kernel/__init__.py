"""Reference kernels, in plain PyTorch, for the path SGLang takes on a CPU with a dense Llama and an EAGLE-3 drafter.

The published `sgl_kernel` (distribution sglang-kernel) cannot be imported without libcuda. The folder that holds this
package goes first on PYTHONPATH of an engine that is started on a CPU, and nowhere else: it is never installed, and a
GPU launch never sees it. `harness/engines/sglang_kernels.py` has the path, and compares what an installed SGLang calls
with what is here.

Covered: SGLang 0.5.20 to 0.5.23, whose calls were read in the wheels of all four and are the same in all four:

    kernel                                   called from, in 0.5.23 (in 0.5.20 to 0.5.22, where that differs)
    assign_req_to_token_pool_cpu             srt/mem_cache/allocation.py
    assign_extend_cache_locs_cpu             kernels/ops/speculative/cache_locs.py (and srt/speculative/spec_utils.py)
    assign_draft_cache_locs_contiguous_cpu   the same (srt/speculative/eagle_worker_common.py)
    fill_accept_out_cache_loc_cpu            kernels/ops/speculative/eagle.py
    fill_bonus_tokens_cpu                    the same
    copy_all_layer_kv_cache_cpu              kernels/ops/kvcache/cache_move.py
    build_draft_decode_metadata_cpu          srt/layers/attention/intel_amx_backend.py
    build_tree_kernel_efficient_cpu          kernels/ops/speculative/spec_tree.py (srt/speculative/eagle_utils.py)
    verify_tree_greedy_cpu                   the same
    extend_attention_cpu                     srt/layers/attention/intel_amx_backend.py, through torch.ops.sgl_kernel
    decode_attention_cpu                     the same

Parameters have the names of the compiled kernels (`retrive_index` is spelt so): SGLang passes some by keyword. B is the
number of requests, P the row length of `req_to_token`, n the number of tokens in a draft tree, its root included.

What is not here stays undefined. SGLang falls back where an import fails, and takes `convert_weight_packed` as the sign
of a processor with AMX (srt/utils/common.py, `_is_intel_amx_backend_available`): a name that answers to everything
would send it down paths that were never covered.
"""

import torch

from .attention import decode_attention_cpu, extend_attention_cpu
from .cache_slots import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
)
from .tree import build_tree_kernel_efficient_cpu, fill_bonus_tokens_cpu, verify_tree_greedy_cpu

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
]

# SGLang reads these two as attributes of the namespace and calls them (intel_amx_backend.py, 0.5.20 to 0.5.23).
torch.ops.sgl_kernel.extend_attention_cpu = extend_attention_cpu
torch.ops.sgl_kernel.decode_attention_cpu = decode_attention_cpu
