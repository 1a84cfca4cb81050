"""The tree of draft tokens: how it hangs together, and how far the target agrees with it.

Node 0 is the root, the token the target said last. Nodes 1 to n - 1 are draft tokens in the order of their scores'
indices. With topk 1 the tree is a chain.
"""

import torch

__all__ = ["build_tree_kernel_efficient_cpu", "fill_bonus_tokens_cpu", "verify_tree_greedy_cpu"]

_QLEN_ONLY = 1
"""`TreeMaskMode.QLEN_ONLY` (kernels/ops/speculative/spec_tree.py 0.5.23, srt/speculative/eagle_utils.py 0.5.20)."""


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Link the selected draft tokens into trees, one for each request.

    Candidate c of a request was drafted as branch `c % topk` of group `c // topk`. Group 0 hangs on the root; group
    g > 0 hangs on candidate `parent_list[i, g]`. A token whose parent was not selected hangs nowhere: no link leads to
    it, so it is never accepted.

    parent_list [B, topk * (depth - 1) + 1], or [B, 0] for depth 1; selected_index [B, n - 1], the candidates that were
    kept, ascending; verified_seq_len [B]; all int64 (int32 will do). **Written**: tree_mask [B * n * n] bool, row i of
    a block is true at the ancestors of node i and at itself; positions [B * n], committed length + depth of the node;
    retrive_index [B, n], the flat number of each node; retrive_next_token and retrive_next_sibling [B, n], first child
    and next sibling in ascending order, where there is none left as it is (the caller fills them with -1).
    depth K; draft_token_num n.

    Raises:
        NotImplementedError: another mask than QLEN_ONLY, the only one that a CPU asks for.

    Source: srt/speculative/eagle_utils.py, `build_tree_kernel_efficient`, `organize_draft_results` and
    `default_tree_mask_mode`; the Triton kernel beside the caller in kernels/ops/speculative/spec_tree.py (0.5.23).
    Order of children: that kernel links from the last node to the first.

    """
    if int(tree_mask_mode) != _QLEN_ONLY:
        raise NotImplementedError(
            f"draftgate's reference kernels: tree mask mode {int(tree_mask_mode)} is not covered, only QLEN_ONLY (1)"
        )
    requests, n = verified_seq_len.numel(), draft_token_num
    nodes = torch.arange(n)
    selected = selected_index.long()
    group = selected // topk
    parent = torch.zeros((requests, n), dtype=torch.long)
    linked = torch.ones((requests, n), dtype=torch.bool)
    linked[:, 0] = False
    if depth > 1:
        candidate = parent_list.long().gather(1, group)
        same = selected[:, None, :] == candidate[:, :, None]
        # argmax of booleans is the first true one.
        parent[:, 1:] = torch.where(group > 0, same.byte().argmax(-1) + 1, 0) * same.any(-1)
        linked[:, 1:] = (group == 0) | same.any(-1)

    visible = torch.zeros((requests, n, n), dtype=torch.bool)
    level = torch.zeros((requests, n), dtype=torch.long)
    node = nodes.expand(requests, n)
    for _ in range(depth + 1):
        visible.scatter_(2, node[:, :, None], value=True)
        level += node > 0
        node = parent.gather(1, node)
    tree_mask.copy_(visible.view_as(tree_mask))
    positions.copy_((verified_seq_len[:, None] + level).view_as(positions))
    retrive_index.copy_(torch.arange(requests * n).view(requests, n))

    child = (parent[:, None, :] == nodes[:, None]) & linked[:, None, :]
    younger = (parent[:, None, :] == parent[:, :, None]) & linked[:, None, :] & linked[:, :, None]
    younger = younger & (nodes > nodes[:, None])
    for out, relatives in ((retrive_next_token, child), (retrive_next_sibling, younger)):
        first = relatives.byte().argmax(-1).to(out.dtype)
        out.copy_(torch.where(relatives.any(-1), first, out))


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Walk each tree from its root, each time to the first child that is what the target says after the node.

    candidates [B, n] int64, the token of each node; retrive_index, retrive_next_token, retrive_next_sibling [B, n]
    int64, as `build_tree_kernel_efficient_cpu` writes them; target_predict [B, n] int64, the target's token after each
    node. **Written**: predicts [B * n] int32, the target's token at every node on the way, the last included;
    accept_index [B, K + 1] int32, flat numbers of those nodes, the root first, the rest left as it is (the caller fills
    it with -1); accept_token_num [B] int32, how many draft tokens were accepted. The token that the target adds is not
    counted.

    SGLang passes all by keyword.

    Source: kernels/ops/speculative/spec_tree.py, `verify_tree_greedy_func` and the Triton kernel beside it (0.5.23);
    srt/speculative/eagle_utils.py (0.5.20 to 0.5.22).
    """
    target = target_predict.reshape(-1)
    steps = accept_index.shape[1]
    node = torch.zeros((candidates.shape[0], 1), dtype=torch.long)
    last = retrive_index[:, :1].long()
    path = torch.full_like(accept_index, -1, dtype=torch.long)
    path[:, :1] = last
    for step in range(1, steps):
        wanted = target[last]
        # -1 is the end of a list of siblings, and stays.
        node = torch.where(node >= 0, retrive_next_token.gather(1, node.clamp(min=0)), -1)
        while bool((other := (node >= 0) & (candidates.gather(1, node.clamp(min=0)) != wanted)).any()):
            node = torch.where(other, retrive_next_sibling.gather(1, node.clamp(min=0)), node)
        found = node >= 0
        if not bool(found.any()):
            break
        last = torch.where(found, retrive_index.gather(1, node.clamp(min=0)), last)
        path[:, step : step + 1] = torch.where(found, last, -1)
    reached = path >= 0
    accept_index.copy_(torch.where(reached, path, accept_index))
    accept_token_num.copy_(reached.sum(1) - 1)
    on_the_way = path[reached]
    predicts[on_the_way] = target[on_the_way].to(predicts.dtype)


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, accept_stride: int
) -> None:
    """Pick the token that the target added: the last of the `accept_lens[i]` in row i of `accept_tokens`.

    accept_tokens [B, K + 1] (or flat) int32; accept_lens [B] int32, the added token counted; bonus_tokens [B] int32,
    **written**; accept_stride K + 1.

    Source: kernels/ops/speculative/eagle.py, `fill_bonus_tokens_func` (0.5.20 to 0.5.23).
    """
    rows = accept_tokens.view(-1, accept_stride)
    bonus_tokens.copy_(rows.gather(1, accept_lens.long()[:, None] - 1)[:, 0])
