"""Attention over packed groups: every completion sees its group's prompt and itself.

Put in place of a model's attention (`install`), it does what the model's own does until a forward pass names the groups
in its row. Then each group is two small dense products instead of one mask over the whole row: the prompt with itself,
and its completions, side by side, with the prompt's keys and their own. Their cost grows with the row's length, not
with its square.

Models hand it through where they pass unknown arguments on to their attention, which those built on transformers'
`AttentionInterface` do; `policy.try_out` finds out whether a model's log-probs stay what they were.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

IMPLEMENTATION: Final = "prompt_once"
ARGUMENT: Final = "packed_groups"
"""What the groups are called among the arguments of a forward pass; no model has an argument of that name."""


@dataclass(frozen=True)
class PackedGroup:
    """One group's part of a row: P tokens of its prompt, then F tokens of L completions, the longest of which has C."""

    prompt: int
    fed: int
    place_LC: Tensor  # of the completions' tokens among the F; anything behind a shorter one's end
    real_F: Tensor  # which of the L x C are tokens
    sees_CK: Tensor  # additive mask over P + C keys


def install(model: Any) -> str:
    """Make this the attention of `model`, if its class lets it be chosen; returns what it had before."""
    before: str = model.config._attn_implementation
    model.set_attn_implementation(IMPLEMENTATION)
    return before


def inputs(groups: list[PackedGroup], tokens_RT: Tensor) -> dict[str, Any]:
    """Arguments of a forward pass over one row of groups."""
    # A mask of four dimensions is handed through as it is, so nobody makes one of T x T; it is not looked at.
    return {ARGUMENT: groups, "attention_mask": tokens_RT.new_zeros(1, 1, 1, 1, dtype=torch.bool)}


def attend(
    module: nn.Module,
    query_RHTD: Tensor,
    key_RhTD: Tensor,
    value_RhTD: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_groups: list[PackedGroup] | None = None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention function: R x T x H x D, and no weights."""
    if packed_groups is None:
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query_RHTD, key_RhTD, value_RhTD, attention_mask, scaling=scaling, **others
        )
        return found
    repeats = query_RHTD.shape[1] // key_RhTD.shape[1]
    sizes = [size for group in packed_groups for size in (group.prompt, group.fed)]
    queries = torch.split(query_RHTD[0].transpose(0, 1), sizes)
    keys = torch.split(key_RhTD[0].repeat_interleave(repeats, 0).transpose(0, 1), sizes)
    values = torch.split(value_RhTD[0].repeat_interleave(repeats, 0).transpose(0, 1), sizes)
    parts = []
    for index, group in enumerate(packed_groups):
        prompt, own = 2 * index, 2 * index + 1
        parts.append(_of_prompt(queries[prompt], keys[prompt], values[prompt], scaling))
        if group.fed:
            key_LHKD = _behind(keys[prompt], keys[own], group)
            value_LHKD = _behind(values[prompt], values[own], group)
            parts.append(_of_completions(queries[own], key_LHKD, value_LHKD, group, scaling))
    return torch.cat(parts)[None], None


def _of_prompt(query_PHD: Tensor, key_PHD: Tensor, value_PHD: Tensor, scaling: float | None) -> Tensor:
    query, key, value = (x_PHD.transpose(0, 1)[None] for x_PHD in (query_PHD, key_PHD, value_PHD))
    return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)[0].transpose(0, 1)


def _of_completions(
    query_FHD: Tensor, key_LHKD: Tensor, value_LHKD: Tensor, group: PackedGroup, scaling: float | None
) -> Tensor:
    query_LHCD = _side_by_side(query_FHD, group).transpose(1, 2)
    seen_LHCD = scaled_dot_product_attention(query_LHCD, key_LHKD, value_LHKD, attn_mask=group.sees_CK, scale=scaling)
    return seen_LHCD.transpose(1, 2).flatten(0, 1).index_select(0, group.real_F)


def _side_by_side(x_FHD: Tensor, group: PackedGroup) -> Tensor:
    """Completions that lie one behind another as L x C."""
    return x_FHD.index_select(0, group.place_LC.flatten()).view(*group.place_LC.shape, *x_FHD.shape[1:])


def _behind(prompt_PHD: Tensor, own_FHD: Tensor, group: PackedGroup) -> Tensor:
    """The prompt's keys, or values, before each completion's own."""
    shared_LPHD = prompt_PHD.expand(len(group.place_LC), *prompt_PHD.shape)
    return torch.cat([shared_LPHD, _side_by_side(own_FHD, group)], dim=1).transpose(1, 2)


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
