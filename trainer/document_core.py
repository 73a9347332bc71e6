"""Packed documents without a mask: on one rank, or after Ulysses has brought the whole sequence."""

from functools import partial
from itertools import pairwise

import torch
import torch.nn as nn
import torch.nn.functional as F

from packed_documents import check_documents


class DocumentCore(nn.Module):
    """Causal attention within documents: q (B, H, T, D), k, v (B, H_kv, T, D) -> (B, H, T, D).
    starts (B, T), on the host; what it lacks of T is padding, and a document, too. The causal
    kernel runs once per document, instead of once with a mask that throws most pairs away.
    FlashAttention (CUDA, 16 bits) needs one call."""

    def forward(self, q, k, v, starts):
        length, grouped = q.shape[2], q.shape != k.shape
        starts = F.pad(starts, (0, length - starts.shape[1]), value=starts.shape[1])
        check_documents(starts)
        edges = (starts == torch.arange(length)).flatten().nonzero().flatten().tolist()
        edges.append(starts.numel())  # document i of the batch: its tokens edges[i] to edges[i + 1]
        lengths = [end - begin for begin, end in pairwise(edges)]
        params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, grouped)
        if torch.backends.cuda.can_use_flash_attention(params):
            rows = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))  # (B T, H, D)
            edges = torch.tensor(edges, dtype=torch.int32)
            edges = edges.pin_memory().to(q.device, non_blocking=True)
            # The documents' edges and the longest one, of queries and of keys. Then: no dropout,
            # causal, no debug mask
            where = edges, edges, max(lengths), max(lengths)
            y, *_ = torch.ops.aten._flash_attention_forward(*rows, *where, 0.0, True, False)
            return y.unflatten(0, starts.shape).transpose(1, 2)
        rows = (t.transpose(0, 1).flatten(1, 2) for t in (q, k, v))  # (H, B T, D)
        documents = zip(*(t.unsqueeze(0).split(lengths, dim=2) for t in rows))
        causal = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=grouped)
        y = torch.cat([causal(*document) for document in documents], dim=2)  # (1, H, B T, D)
        return y.squeeze(0).unflatten(1, starts.shape).transpose(0, 1)


def attend_by_document(model):
    """For a model that is called with starts: in place of AttentionCore's mask."""
    for block in model.blocks.values():
        block.attn.core = DocumentCore()
    return model
