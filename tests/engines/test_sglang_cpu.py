"""The reference kernels against loops that do the same one element at a time."""

from __future__ import annotations

import importlib.util
import math
import sys

import pytest
import torch

from harness.engines.sglang_kernels import FOLDER


@pytest.fixture(scope="module")
def kernels():
    """Return the package, imported under another name: the suite must not leave an `sgl_kernel` behind."""
    name = "sgl_kernel_under_test"
    folder = FOLDER / "sgl_kernel"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    yield module
    for each in [each for each in sys.modules if each.partition(".")[0] == name]:
        del sys.modules[each]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def pool(rows=6, columns=40):
    """Return a `req_to_token` in which no two cells are alike."""
    return torch.randperm(rows * columns).view(rows, columns).to(torch.int32)


INDEX = pytest.mark.parametrize("index", [torch.int32, torch.int64])


# ------------------------------------------------------------------------------------------------------------- slots


@INDEX
@pytest.mark.parametrize("spans", [[(3, 8), (0, 5), (7, 7), (10, 11)], [(2, 2)], []])
def test_slots_are_entered_and_read_back(kernels, index, spans):
    start, end = (torch.tensor([span[side] for span in spans], dtype=index) for side in (0, 1))
    rows = torch.tensor([5, 1, 2, 0][: len(spans)])
    total = sum(b - a for a, b in spans)
    slots = torch.arange(1000, 1000 + total)
    table = pool()
    expected = table.clone()
    at = 0
    for row, (a, b) in zip(rows.tolist(), spans, strict=True):
        for column in range(a, b):
            expected[row, column] = slots[at]
            at += 1
    kernels.assign_req_to_token_pool_cpu(rows, table, start, end, slots, table.shape[1])
    assert torch.equal(table, expected)

    read = torch.full((total + 3,), -7)
    kernels.assign_extend_cache_locs_cpu(rows, table, start, end, read, table.shape[1])
    assert read.tolist() == [*slots.tolist(), -7, -7, -7]


@INDEX
@pytest.mark.parametrize(("topk", "steps"), [(1, 1), (1, 4), (3, 2)])
def test_draft_slots_follow_the_committed_ones(kernels, index, topk, steps):
    table, rows, lengths = pool(), torch.tensor([4, 0, 3]), torch.tensor([7, 1, 20], dtype=index)
    out = torch.zeros(3 * topk * steps, dtype=torch.int64)
    kernels.assign_draft_cache_locs_contiguous_cpu(rows, table, lengths, out, table.shape[1], topk, steps)
    expected = [table[row, n + j] for row, n in zip(rows, lengths, strict=True) for j in range(topk * steps)]
    assert out.tolist() == [int(slot) for slot in expected]


@INDEX
@pytest.mark.parametrize(("topk", "steps"), [(1, 1), (1, 4), (3, 2)])
def test_each_branch_has_a_row_of_its_own(kernels, index, topk, steps):
    # The last request leaves no room behind its own slots: nothing may be read past the end of a row.
    table, rows = pool(columns=30), torch.tensor([4, 0, 3])
    lengths = torch.tensor([7, 1, 30 - topk * steps], dtype=index)
    out = kernels.build_draft_decode_metadata_cpu(table, rows, lengths, topk, steps, 30)
    assert out.shape == (3 * topk, 30)
    assert out.dtype == table.dtype
    for i, (row, n) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        for branch in range(topk):
            for column in range(n + steps):
                source = column if column < n else column + branch * steps
                assert out[i * topk + branch, column] == table[row, source]


def test_no_request_has_no_branches(kernels):
    nothing = torch.zeros(0, dtype=torch.int64)
    assert kernels.build_draft_decode_metadata_cpu(pool(), nothing, nothing, 2, 3, 40).shape == (0, 40)


@INDEX
def test_accepted_slots_are_collected(kernels, index):
    out_cache_loc, out = torch.arange(100, 112), torch.full((6,), -7)
    accept_index = torch.tensor([[0, 2, -1], [5, -1, -1], [9, 10, 11]], dtype=index)
    kernels.fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, out)
    assert out.tolist() == [100, 102, 105, 109, 110, 111]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@INDEX
def test_slots_are_copied_as_if_all_were_read_first(kernels, dtype, index):
    buffers = [torch.randn(10, 2, width).to(dtype) for width in (4, 4, 8)]
    target, source = torch.tensor([1, 2, 3, 9], dtype=index), torch.tensor([0, 1, 2, 9], dtype=index)
    expected = [buffer.clone() for buffer in buffers]
    for old, new in zip(buffers, expected, strict=True):
        for to, whence in zip(target.tolist(), source.tolist(), strict=True):
            new[to] = old[whence]
    pointers = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64)
    strides = torch.tensor([buffer.stride(0) * buffer.itemsize for buffer in buffers])
    kernels.copy_all_layer_kv_cache_cpu(pointers, strides, target, source)
    assert all(torch.equal(*pair) for pair in zip(buffers, expected, strict=True))
    kernels.copy_all_layer_kv_cache_cpu(pointers, strides, target[:0], source[:0])


# -------------------------------------------------------------------------------------------------------------- tree


def drafted(requests, topk, depth, n):
    """Return (parent_list, selected_index) as SGLang's draft loop makes them, for random scores.

    srt/speculative/eagle_utils.py `organize_draft_results` and spec_utils.py `select_top_k_tokens`, 0.5.23.
    """
    scores = torch.rand(requests, topk).sort(descending=True).values
    all_scores, parents = [scores], [torch.arange(-1, topk).expand(requests, -1)]
    for step in range(1, depth):
        children = scores[:, :, None] * torch.rand(requests, topk, topk).sort(descending=True).values
        best = children.flatten(1).topk(topk)
        all_scores.append(children.flatten(1))
        scores = best.values
        parents.append(best.indices + (topk * topk * (step - 1) + topk))
    kept = torch.cat(all_scores, 1).topk(n - 1).indices.sort().values
    return torch.cat(parents[:-1], 1) if depth > 1 else torch.empty(requests, 0, dtype=torch.long), kept


def build(kernels, parent_list, selected, lengths, topk, depth, n):
    requests = len(lengths)
    mask = torch.ones(requests * n * n, dtype=torch.bool)
    positions = torch.full((requests * n,), -7)
    links = [torch.full((requests, n), -1) for _ in range(3)]
    kernels.build_tree_kernel_efficient_cpu(parent_list, selected, lengths, mask, positions, *links, topk, depth, n, 1)
    return mask.view(requests, n, n), positions.view(requests, n), *links


def naive_parents(parent_list, selected, topk):
    """Return each node's parent, None for a node whose parent was not selected."""
    parents = [0]
    for candidate in selected:
        group = candidate // topk
        if group == 0:
            parents.append(0)
        else:
            parents.append(selected.index(parent_list[group]) + 1 if parent_list[group] in selected else None)
    return parents


@pytest.mark.parametrize(
    ("topk", "depth", "n"), [(1, 1, 2), (1, 4, 5), (2, 1, 3), (2, 3, 6), (3, 4, 12), (4, 5, 32), (8, 3, 60)]
)
def test_tree_is_what_its_parents_say(kernels, topk, depth, n):
    lengths = torch.tensor([5, 17, 400])
    parent_list, selected = drafted(3, topk, depth, n)
    mask, positions, index, child, sibling = build(kernels, parent_list, selected, lengths, topk, depth, n)
    assert index.flatten().tolist() == list(range(3 * n))
    for i in range(3):
        parents = naive_parents(parent_list[i].tolist(), selected[i].tolist(), topk)
        assert None not in parents
        for node in range(n):
            chain = [node]
            while chain[-1]:
                chain.append(parents[chain[-1]])
            assert mask[i, node].nonzero().flatten().tolist() == sorted(chain)
            assert positions[i, node] == lengths[i] + len(chain) - 1
            children = [other for other in range(1, n) if parents[other] == node]
            assert [int(child[i, node])] == (children[:1] or [-1])
            for one, following in zip(children, [*children[1:], -1][: len(children)], strict=True):
                assert sibling[i, one] == following


def test_token_whose_parent_was_not_kept_cannot_be_reached(kernels):
    # Candidates 0, 1 are of the root; 2, 3 of candidate 0; 4, 5 of candidate 1, which was not kept.
    parent_list, selected = torch.tensor([[-1, 0, 1]]), torch.tensor([[0, 2, 4]])
    mask, positions, _, child, sibling = build(kernels, parent_list, selected, torch.tensor([9]), 2, 2, 4)
    assert child.tolist() == [[1, 2, -1, -1]]
    assert sibling.tolist() == [[-1, -1, -1, -1]]
    assert mask[0, 2].tolist() == [True, True, True, False]
    assert positions.tolist()[0][:3] == [9, 10, 11]


@pytest.mark.parametrize("mode", [0, 2])
def test_other_masks_are_refused(kernels, mode):
    parent_list, selected = drafted(1, 1, 2, 3)
    links = [torch.full((1, 3), -1) for _ in range(3)]
    with pytest.raises(NotImplementedError, match=f"mode {mode}"):
        kernels.build_tree_kernel_efficient_cpu(
            parent_list,
            selected,
            torch.tensor([4]),
            torch.ones(9, dtype=torch.bool),
            torch.zeros(3),
            *links,
            1,
            2,
            3,
            mode,
        )


def naive_verify(candidates, index, child, sibling, target, steps):
    predicts, accept_index, counts = {}, [], []
    flat = target.flatten().tolist()
    for i in range(len(candidates)):
        node, path = 0, [int(index[i, 0])]
        while len(path) < steps:
            node = int(child[i, node])
            while node != -1 and int(candidates[i, node]) != flat[path[-1]]:
                node = int(sibling[i, node])
            if node == -1:
                break
            path.append(int(index[i, node]))
        predicts |= {at: flat[at] for at in path}
        counts.append(len(path) - 1)
        accept_index.append(path + [-1] * (steps - len(path)))
    return predicts, accept_index, counts


@pytest.mark.parametrize(
    ("topk", "depth", "n"), [(1, 1, 2), (1, 4, 5), (2, 1, 3), (2, 3, 6), (3, 4, 12), (4, 5, 32), (8, 3, 60)]
)
def test_verification_walks_as_far_as_the_target_agrees(kernels, topk, depth, n):
    requests = 24
    tree = drafted(requests, topk, depth, n)
    _, _, index, child, sibling = build(kernels, *tree, torch.full((requests,), 9), topk, depth, n)
    # So few tokens that paths of every length occur, and siblings of the same token too.
    vocabulary = max(topk, 2)
    candidates, target = (torch.randint(0, vocabulary, (requests, n)) for _ in range(2))
    predicts = torch.full((requests * n,), -7, dtype=torch.int32)
    accept_index = torch.full((requests, depth + 1), -1, dtype=torch.int32)
    counts = torch.full((requests,), -7, dtype=torch.int32)
    kernels.verify_tree_greedy_cpu(
        predicts=predicts,
        accept_index=accept_index,
        accept_token_num=counts,
        candidates=candidates,
        retrive_index=index,
        retrive_next_token=child,
        retrive_next_sibling=sibling,
        target_predict=target,
    )
    expected_predicts, expected_index, expected_counts = naive_verify(
        candidates, index, child, sibling, target, depth + 1
    )
    assert counts.tolist() == expected_counts
    assert len(set(expected_counts)) > 1
    assert accept_index.tolist() == expected_index
    assert predicts.tolist() == [expected_predicts.get(at, -7) for at in range(requests * n)]


def test_bonus_token_is_the_last_accepted(kernels):
    tokens = torch.arange(12, dtype=torch.int32)
    bonus = torch.zeros(3, dtype=torch.int32)
    kernels.fill_bonus_tokens_cpu(tokens, torch.tensor([1, 4, 2], dtype=torch.int32), bonus, 4)
    assert bonus.tolist() == [0, 7, 9]
    kernels.fill_bonus_tokens_cpu(tokens.view(3, 4), torch.tensor([1, 4, 2], dtype=torch.int32), bonus, 4)
    assert bonus.tolist() == [0, 7, 9]


# --------------------------------------------------------------------------------------------------------- attention

HEADS, GROUPS, SIZE, VALUE_SIZE, SCALE = 6, 2, 8, 4, 0.3
VARIANTS = pytest.mark.parametrize(
    ("cap", "window"), [(0.0, 0), (2.5, 0), (0.0, 1), (0.0, 4), (1.5, 7)], ids=["plain", "cap", "w1", "w4", "cap+w7"]
)
DTYPES = pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])


class Cache:
    """Requests of given lengths, their keys and values scattered over the slots; other slots hold NaN."""

    def __init__(self, lengths, dtype):
        self.table = pool(rows=len(lengths) + 2)
        self.rows = torch.randperm(len(lengths) + 2)[: len(lengths)]
        self.lengths = torch.tensor(lengths)
        self.keys = torch.full((self.table.numel(), GROUPS, SIZE), math.nan, dtype=dtype)
        self.values = torch.full((self.table.numel(), GROUPS, VALUE_SIZE), math.nan, dtype=dtype)
        for row, length in zip(self.rows, lengths, strict=True):
            slots = self.table[row, :length].long()
            self.keys[slots] = torch.randn(length, GROUPS, SIZE).to(dtype)
            self.values[slots] = torch.randn(length, GROUPS, VALUE_SIZE).to(dtype)

    def slots(self, i):
        return self.table[self.rows[i], : self.lengths[i]].long()


def naive_attention(query, keys, values, sees, cap):
    """Return what one token of H heads gets, in float64; `sees` are the positions visible to it."""
    out = torch.zeros(HEADS, VALUE_SIZE, dtype=torch.float64)
    for head in range(HEADS):
        group = head // (HEADS // GROUPS)
        scores = []
        for position in sees:
            score = SCALE * float(query[head].double() @ keys[position, group].double())
            scores.append(cap * math.tanh(score / cap) if cap else score)
        weights = [math.exp(score - max(scores)) for score in scores]
        for weight, position in zip(weights, sees, strict=True):
            out[head] += weight / sum(weights) * values[position, group].double()
    return out


def extend(kernels, cache, query, extensions, cap=0.0, window=0, tree_mask=None, new=(None, None), **changes):
    output = torch.full((len(query), HEADS, VALUE_SIZE), -7.0, dtype=query.dtype)
    call = {
        "q_extend": query,
        "k_extend": new[0],
        "v_extend": new[1],
        "o_extend": output,
        "k_buffer": cache.keys,
        "v_buffer": cache.values,
        "k_scale": 1.0,
        "v_scale": 1.0,
        "req_to_token": cache.table,
        "req_pool_indices": cache.rows,
        "seq_lens": cache.lengths,
        "extend_seq_lens": torch.tensor(extensions, dtype=torch.int32),
        "extend_start_loc": torch.tensor([sum(extensions[:i]) for i in range(len(extensions))], dtype=torch.int32),
        "max_len_extend": max(extensions),
        "sm_scale": SCALE,
        "logit_cap": cap,
        "is_cross_attn": False,
        "sliding_window_size": window,
        "encoder_lens": None,
        "sinks": None,
        "tree_mask": tree_mask,
        "is_causal": True,
    }
    torch.ops.sgl_kernel.extend_attention_cpu(*(call | changes).values())
    return output


@DTYPES
@VARIANTS
@pytest.mark.parametrize("stored_only", [False, True])
def test_extension_sees_its_prefix_and_what_came_before(kernels, dtype, close, cap, window, stored_only):
    cache, extensions = Cache([9, 5, 12, 1], dtype), [4, 5, 1, 1]
    query = torch.randn(sum(extensions), HEADS, SIZE).to(dtype)
    new = [cache.slots(i)[-length:] for i, length in enumerate(extensions)]
    given = (None, None) if stored_only else (cache.keys[torch.cat(new)], cache.values[torch.cat(new)])
    output = extend(kernels, cache, query, extensions, cap, window, new=given)
    at = 0
    for i, length in enumerate(extensions):
        keys, values = cache.keys[cache.slots(i)], cache.values[cache.slots(i)]
        for position in range(int(cache.lengths[i]) - length, int(cache.lengths[i])):
            first = max(0, position - window + 1) if window else 0
            expected = naive_attention(query[at], keys, values, range(first, position + 1), cap)
            torch.testing.assert_close(output[at].double(), expected, atol=close, rtol=close)
            at += 1


def test_new_tokens_need_not_be_stored(kernels):
    cache = Cache([9], torch.float32)
    query, slots = torch.randn(4, HEADS, SIZE), cache.slots(0)[-4:]
    new = (cache.keys[slots].clone(), cache.values[slots].clone())
    expected = extend(kernels, cache, query, [4])
    cache.keys[slots], cache.values[slots] = math.nan, math.nan
    assert torch.equal(extend(kernels, cache, query, [4], new=new), expected)


@DTYPES
@pytest.mark.parametrize("cap", [0.0, 2.5])
def test_a_draft_token_sees_the_prefix_and_its_ancestors(kernels, dtype, close, cap):
    topk, depth, n = 3, 3, 8
    cache = Cache([n + 6, n, n + 11], dtype)
    mask = build(kernels, *drafted(3, topk, depth, n), cache.lengths - n, topk, depth, n)[0]
    query = torch.randn(3 * n, HEADS, SIZE).to(dtype)
    output = extend(kernels, cache, query, [n] * 3, cap, tree_mask=mask.flatten())
    for i in range(3):
        keys, values, prefix = cache.keys[cache.slots(i)], cache.values[cache.slots(i)], int(cache.lengths[i]) - n
        for node in range(n):
            sees = [*range(prefix), *(prefix + at for at in range(n) if mask[i, node, at])]
            expected = naive_attention(query[i * n + node], keys, values, sees, cap)
            torch.testing.assert_close(output[i * n + node].double(), expected, atol=close, rtol=close)


def decode(kernels, cache, query, key, value, loc, cap=0.0, window=0, **changes):
    output = torch.full((len(query), HEADS, VALUE_SIZE), -7.0, dtype=query.dtype)
    call = {
        "query": query,
        "k_buffer": cache.keys,
        "v_buffer": cache.values,
        "k_scale": 1.0,
        "v_scale": 1.0,
        "output": output,
        "key": key,
        "value": value,
        "loc": loc,
        "attn_logits": torch.zeros(0),
        "req_to_token": cache.table,
        "req_pool_indices": cache.rows,
        "seq_lens": cache.lengths,
        "sm_scale": SCALE,
        "logit_cap": cap,
        "is_cross_attn": False,
        "sliding_window_size": window,
        "encoder_lens": None,
        "sinks": None,
    }
    torch.ops.sgl_kernel.decode_attention_cpu(*(call | changes).values())
    return output


@DTYPES
@VARIANTS
@pytest.mark.parametrize("stored_only", [False, True])
def test_decoding_stores_the_new_token_and_sees_all(kernels, dtype, close, cap, window, stored_only):
    cache = Cache([9, 1, 30], dtype)
    query = torch.randn(3, HEADS, SIZE).to(dtype)
    loc = torch.stack([cache.slots(i)[-1] for i in range(3)])
    key, value = cache.keys[loc].clone(), cache.values[loc].clone()
    if stored_only:
        output = decode(kernels, cache, query, None, None, loc, cap, window)
    else:
        cache.keys[loc], cache.values[loc] = math.nan, math.nan
        output = decode(kernels, cache, query, key, value, loc, cap, window)
    assert torch.equal(cache.keys[loc], key)
    assert torch.equal(cache.values[loc], value)
    for i in range(3):
        length = int(cache.lengths[i])
        sees = range(max(0, length - window) if window else 0, length)
        expected = naive_attention(query[i], cache.keys[cache.slots(i)], cache.values[cache.slots(i)], sees, cap)
        torch.testing.assert_close(output[i].double(), expected, atol=close, rtol=close)


def test_no_request_is_no_work(kernels):
    cache = Cache([3], torch.float32)
    cache.rows, cache.lengths = cache.rows[:0], cache.lengths[:0]
    nothing = torch.zeros(0, GROUPS, SIZE), torch.zeros(0, GROUPS, VALUE_SIZE), torch.zeros(0, dtype=torch.int64)
    assert decode(kernels, cache, torch.zeros(0, HEADS, SIZE), *nothing).shape == (0, HEADS, VALUE_SIZE)


REFUSED = {
    "sinks": ({"sinks": torch.zeros(HEADS)}, NotImplementedError, "sinks"),
    "encoder": ({"encoder_lens": torch.zeros(1)}, NotImplementedError, "encoder"),
    "cross attention": ({"is_cross_attn": True}, NotImplementedError, "encoder"),
    "8-bit cache": ({"k_buffer": torch.zeros(1, dtype=torch.float8_e4m3fn)}, NotImplementedError, "float8_e4m3fn"),
    "the call of 0.5.18": ({"k_scale": torch.zeros(1)}, TypeError, r"0\.5\.20 to 0\.5\.23"),
}


@pytest.mark.parametrize(("changes", "error", "says"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_covered_is_refused(kernels, changes, error, says):
    cache = Cache([3], torch.float32)
    with pytest.raises(error, match=says):
        extend(kernels, cache, torch.zeros(2, HEADS, SIZE), [2], **changes)
    with pytest.raises(error, match=says):
        decode(kernels, cache, torch.zeros(1, HEADS, SIZE), None, None, torch.zeros(1, dtype=torch.int64), **changes)


def test_extensions_that_are_not_covered_are_refused(kernels):
    cache, query = Cache([3], torch.float32), torch.zeros(2, HEADS, SIZE)
    with pytest.raises(NotImplementedError, match="causality"):
        extend(kernels, cache, query, [2], is_causal=False)
    with pytest.raises(NotImplementedError, match="sliding window over a draft tree"):
        extend(kernels, cache, query, [2], window=4, tree_mask=torch.ones(4, dtype=torch.bool))
    with pytest.raises(NotImplementedError, match="tree mask of 6 entries"):
        extend(kernels, cache, query, [2], tree_mask=torch.ones(6, dtype=torch.bool))


# ----------------------------------------------------------------------------------------------------------- package


def test_package_says_nothing_of_what_it_lacks(kernels):
    # SGLang takes this one as the sign of AMX, and falls back where a name cannot be imported.
    assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed")
    with pytest.raises(AttributeError):
        _ = kernels.convert_weight_packed
    with pytest.raises(AttributeError):
        _ = kernels.rmsnorm
