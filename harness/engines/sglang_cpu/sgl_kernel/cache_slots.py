"""Which slots of the KV cache a request owns, and moving what stands in them.

A slot is a row of every layer's key and value buffer. `req_to_token[r, p]` is the slot of position p of the request in
row r. Facts: shapes and dtypes from the callers named below and from the comments of the compiled kernels
(sgl-kernel/csrc/cpu/spec.cpp and kvcache.cpp in SGLang's repository).
"""

import ctypes

import torch

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
]


def _cells(
    req_pool_indices: torch.Tensor, start_offset: torch.Tensor, end_offset: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return row and column of every cell in `[start, end)` of each request, request by request."""
    lengths = (end_offset - start_offset).long()
    first = lengths.cumsum(0) - lengths
    rows = req_pool_indices.long().repeat_interleave(lengths)
    # What a running count over all cells lacks to be the column.
    shift = (start_offset - first).repeat_interleave(lengths)
    return rows, torch.arange(rows.numel()) + shift


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,  # noqa: ARG001 -- the compiled kernel needs it for pointers
) -> None:
    """Enter newly allocated slots: `req_to_token[req_pool_indices[i], start[i]:end[i]]` = the next of `out_cache_loc`.

    req_pool_indices [B] int32 or int64; req_to_token [rows, P] int32, **written**; start_offset, end_offset [B] int32
    or int64, end >= start; out_cache_loc [sum of lengths] int64; pool_len P.

    Source: srt/mem_cache/allocation.py, `assign_req_to_token_pool_func` (0.5.20 to 0.5.23).
    """
    rows, columns = _cells(req_pool_indices, start_offset, end_offset)
    req_to_token[rows, columns] = out_cache_loc[: rows.numel()].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,  # noqa: ARG001 -- as above
) -> None:
    """Read slots back, request by request: the reverse of `assign_req_to_token_pool_cpu`.

    Shapes and dtypes as there; out_cache_loc [at least the sum of lengths] int64, **written** from its beginning, the
    rest left as it is (the caller's buffer may be longer than what was accepted).

    Source: kernels/ops/speculative/cache_locs.py, `assign_extend_cache_locs_func` and `fill_front_out_cache_loc_func`
    (0.5.23); srt/speculative/spec_utils.py, `move_accept_tokens_to_target_kvcache` (0.5.20 to 0.5.22).
    """
    rows, columns = _cells(req_pool_indices, start_offset, end_offset)
    out_cache_loc[: rows.numel()] = req_to_token[rows, columns].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,  # noqa: ARG001 -- as above
    topk: int,
    num_steps: int,
) -> None:
    """Read the slots that drafting will fill: the `topk * num_steps` after the `seq_lens[i]` committed ones.

    Branch t of request i writes its draft step s at `req_to_token[r, seq_lens[i] + t * num_steps + s]`.

    req_pool_indices, seq_lens [B] int32 or int64; req_to_token [rows, P] int32; out_cache_loc [B * topk * num_steps]
    int64, **written**.

    Source: srt/speculative/eagle_worker_common.py, `prepare_for_draft` (0.5.20 to 0.5.23).
    """
    columns = seq_lens.long()[:, None] + torch.arange(topk * num_steps)
    slots = req_to_token[req_pool_indices.long()[:, None], columns]
    out_cache_loc.copy_(slots.view_as(out_cache_loc))


def build_draft_decode_metadata_cpu(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> torch.Tensor:
    """Return a `req_to_token` with one row for each branch of each request: [B * topk, P], dtype as given.

    Row `i * topk + t` holds the committed slots of request i, then the `num_steps` draft slots of branch t, as
    `assign_draft_cache_locs_contiguous_cpu` lays them out. What follows is undefined in the compiled kernel, here 0.

    req_to_token [rows, P] int32; req_pool_indices, seq_lens [B] int32 or int64; pool_len P.

    Source: srt/layers/attention/intel_amx_backend.py, `IntelAMXMultiStepDraftBackend.init_forward_metadata`
    (0.5.20 to 0.5.23).
    """
    committed = seq_lens.long()[:, None, None]
    out = req_to_token.new_zeros((seq_lens.numel(), topk, pool_len))
    if not seq_lens.numel():
        return out.view(-1, pool_len)
    columns = torch.arange(int(seq_lens.max()) + num_steps)
    branches = torch.arange(topk)[:, None]
    source = columns + branches * num_steps * (columns >= committed)
    slots = req_to_token[req_pool_indices.long()[:, None, None], source.clamp(max=pool_len - 1)]
    out[:, :, : columns.numel()] = slots * (columns < committed + num_steps)
    return out.view(-1, pool_len)


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """Collect the slots of accepted tokens: `out_cache_loc[accept_index]`, leaving out every index of -1.

    accept_index [B, K + 1] (any shape) int32 or int64, flat indices into out_cache_loc; out_cache_loc [B * n] int64;
    accept_out_cache_loc [B * (K + 1)] int64, **written** from its beginning, the rest left as it is.

    Source: kernels/ops/speculative/eagle.py, `fill_accept_out_cache_loc_func` (0.5.20 to 0.5.23); called for topk > 1.
    """
    accepted = accept_index[accept_index >= 0].long()
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted]


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Copy slots in every layer's buffers: `buffer[tgt_loc[j]] = buffer[src_loc[j]]`, as if all were read first.

    data_ptrs [buffers] uint64, addresses of contiguous buffers in this process, **written through**; strides [buffers]
    int64, bytes in a slot; tgt_loc, src_loc [slots] int32 or int64.

    Source: kernels/ops/kvcache/cache_move.py, `copy_all_layer_kv_cache_func` (0.5.20 to 0.5.23). Called at start-up
    with one slot onto itself (srt/mem_cache/memory_pool.py), and for topk > 1 after every verification.
    """
    if not tgt_loc.numel():
        return
    source, target = src_loc.long(), tgt_loc.long()
    rows = int(torch.maximum(source.max(), target.max())) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (rows * stride)).from_address(address)
        buffer = torch.frombuffer(memory, dtype=torch.uint8).view(rows, stride)
        buffer[target] = buffer[source]
