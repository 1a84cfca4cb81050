"""Attention over the paged KV cache: several new tokens a request (extend), or one (decode).

H query heads, G key heads (H a multiple of G), D and Dv their sizes. Queries, keys and values of one forward pass are
flat: request i owns rows `start[i]` to `start[i] + length[i]`. Sums are in float32 whatever the dtype.
"""

from typing import NoReturn

import torch

__all__ = ["decode_attention_cpu", "extend_attention_cpu"]


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(f"draftgate's reference kernels: {what} is not covered")


def _check(
    buffers: tuple[torch.Tensor, torch.Tensor],
    query: torch.Tensor,
    scales: tuple[float, float],
    *,
    is_cross_attn: bool,
    encoder_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    """Raise unless the call is one of those covered."""
    if not all(isinstance(scale, (int, float)) for scale in scales):
        raise TypeError(
            "draftgate's reference kernels: attention was called without k_scale and v_scale, as by SGLang up to "
            "0.5.19; 0.5.20 to 0.5.23 are covered"
        )
    if any(buffer.dtype != query.dtype for buffer in buffers):
        _refuse(f"a KV cache in {buffers[0].dtype} under {query.dtype} activations")
    if is_cross_attn or encoder_lens is not None:
        _refuse("attention to an encoder")
    if sinks is not None:
        _refuse("attention with sinks")


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor, scale: float, logit_cap: float
) -> torch.Tensor:
    """Return softmax(scale * query key^T) value, float32 [R, T, H, Dv].

    query [R, T, H, D], key [R, S, G, D], value [R, S, G, Dv], visible [R, T, S] bool: which keys a token sees, at least
    one each. logit_cap c > 0 makes a score x into c tanh(x / c).
    """
    requests, tokens, heads, _ = query.shape
    groups = key.shape[2]
    # Query heads that share a key head stand in one matrix: [R, G, H / G * T, D].
    query = query.float().unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    scores = torch.matmul(query, key.float().permute(0, 2, 3, 1)).mul_(scale)
    if logit_cap > 0:
        scores = scores.div_(logit_cap).tanh_().mul_(logit_cap)
    scores = scores.unflatten(2, (-1, tokens)).masked_fill_(~visible[:, None, None], float("-inf"))
    found = torch.matmul(scores.softmax(-1).flatten(2, 3), value.float().transpose(1, 2))
    return found.unflatten(2, (-1, tokens)).permute(0, 3, 1, 2, 4).reshape(requests, tokens, heads, -1)


def extend_attention_cpu(
    q_extend: torch.Tensor,
    k_extend: torch.Tensor | None,
    v_extend: torch.Tensor | None,
    o_extend: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    extend_start_loc: torch.Tensor,
    max_len_extend: int,  # noqa: ARG001 -- the compiled kernel sizes its work by it
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window_size: int,
    encoder_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
    tree_mask: torch.Tensor | None,
    is_causal: bool,
) -> None:
    """Attend from `extend_seq_lens[i]` new tokens of each request to its earlier tokens and among themselves.

    Serves prefill, the drafter's extension, and verification. The prefix is read from the KV cache. The new tokens'
    keys and values are k_extend and v_extend; the caller has stored them as well, and where it passes None they are
    read from there.

    q_extend [T, H, D]; k_extend [T, G, D]; v_extend [T, G, Dv]; o_extend [T, H, Dv], **written**; k_buffer
    [slots, G, D], v_buffer [slots, G, Dv]; all float32 or bfloat16, the same. req_to_token [rows, P] int32;
    req_pool_indices [B]; seq_lens [B], prefix and new tokens; extend_seq_lens, extend_start_loc [B], int32 or int64.
    k_scale, v_scale: floats for caches in 8 bits, without effect on others. sm_scale multiplies scores; logit_cap 0 or
    the cap c of c tanh(x / c). sliding_window_size 0, or how many tokens a token sees, itself included (the layer's
    size + 1). tree_mask None, or bool [sum of length^2]: which of the new tokens each sees; all see the prefix.

    Raises:
        NotImplementedError: a cache in another dtype, attention to an encoder or without causality, sinks, a sliding
            window under a tree mask (a window over tree depths, which the dense path never asks for), or a tree mask of
            another size.
        TypeError: k_scale or v_scale is not a number, as in SGLang up to 0.5.19, which passes none.

    Source: srt/layers/attention/intel_amx_backend.py, `forward_extend` (0.5.20 to 0.5.23).

    """
    _check(
        (k_buffer, v_buffer),
        q_extend,
        (k_scale, v_scale),
        is_cross_attn=is_cross_attn,
        encoder_lens=encoder_lens,
        sinks=sinks,
    )
    if not is_causal:
        _refuse("attention without causality")
    lengths = extend_seq_lens.tolist()
    if tree_mask is not None:
        if sliding_window_size > 0:
            _refuse("a sliding window over a draft tree (topk above 1)")
        if tree_mask.numel() != sum(length * length for length in lengths):
            _refuse(f"a tree mask of {tree_mask.numel()} entries for extensions of {lengths} (only QLEN_ONLY masks)")
    mask_at = 0
    # Lengths differ, so requests are taken one by one; a padded batch would hold scores for the longest of each.
    rows = zip(req_pool_indices.tolist(), seq_lens.tolist(), lengths, extend_start_loc.tolist(), strict=True)
    for row, total, length, start in rows:
        prefix, new = total - length, slice(start, start + length)
        slots = req_to_token[row, :total].long()
        key, value = k_buffer[slots], v_buffer[slots]
        if k_extend is not None and v_extend is not None:
            key[prefix:], value[prefix:] = k_extend[new], v_extend[new]
        visible = torch.ones((length, total), dtype=torch.bool)
        if tree_mask is None:
            visible.tril_(prefix)
            if sliding_window_size > 0:
                visible.triu_(prefix - sliding_window_size + 1)
        else:
            visible[:, prefix:] = tree_mask[mask_at : mask_at + length * length].view(length, length)
            mask_at += length * length
        o_extend[new] = _attend(q_extend[None, new], key[None], value[None], visible[None], sm_scale, logit_cap)[0].to(
            o_extend.dtype
        )


def decode_attention_cpu(
    query: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale: float,
    v_scale: float,
    output: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    loc: torch.Tensor,
    attn_logits: torch.Tensor,  # noqa: ARG001 -- the compiled kernel's scratch space
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window_size: int,
    encoder_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    """Store the keys and values of one new token a request, then attend from it to all tokens of the request.

    Serves decoding, and drafting, where each branch of a tree counts as a request with a row of its own
    (`build_draft_decode_metadata_cpu`).

    query [B, H, D]; output [B, H, Dv], **written**; key [B, G, D], value [B, G, Dv], or None where the caller has
    stored them; loc [B] int64, their slots in k_buffer [slots, G, D] and v_buffer [slots, G, Dv], both **written**
    first.
    seq_lens [B] int64, the new token included. The rest as in `extend_attention_cpu`.

    Raises:
        NotImplementedError: a cache in another dtype, attention to an encoder, sinks.
        TypeError: k_scale or v_scale is not a number.

    Source: srt/layers/attention/intel_amx_backend.py, `forward_decode` (0.5.20 to 0.5.23).

    """
    _check(
        (k_buffer, v_buffer),
        query,
        (k_scale, v_scale),
        is_cross_attn=is_cross_attn,
        encoder_lens=encoder_lens,
        sinks=sinks,
    )
    if key is not None and value is not None:
        k_buffer[loc], v_buffer[loc] = key, value
    if not seq_lens.numel():
        return
    columns = torch.arange(int(seq_lens.max()))
    length = seq_lens[:, None]
    visible = columns < length
    if sliding_window_size > 0:
        visible &= columns >= length - sliding_window_size
    slots = req_to_token[req_pool_indices, : columns.numel()].long()
    # A slot that is not the request's may hold anything, and 0 x NaN is NaN: read the request's own last one instead.
    slots = torch.where(visible, slots, slots.gather(1, length - 1))
    found = _attend(query[:, None], k_buffer[slots], v_buffer[slots], visible[:, None], sm_scale, logit_cap)
    output.copy_(found[:, 0])
