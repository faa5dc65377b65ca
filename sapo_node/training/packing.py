"""Groups to model inputs: a prompt once, its completions behind it, each seeing the prompt and itself only.

Groups lie one behind another in one row without padding. Attention keeps completions apart (`attention.py`) and every
completion's positions go on where its prompt ended, so each token's log-prob is that of an unpacked, unpadded forward
pass; the prompt is computed once instead of L times. Names: R sequences (rows) of T tokens, N tokens to be predicted.

Models whose attention cannot be told of groups get `pad` instead: one completion a row, padded on the right.

The last token of a completion is predicted but never fed: nothing behind it is predicted from it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sapo_node.training.attention import PackedGroup


@dataclass(frozen=True)
class Piece:
    """A prompt and completions of it (at least one token each), to be packed into one row."""

    prompt: list[int]
    completions: list[list[int]]
    keys: list[int]  # the caller's numbers of these completions

    @property
    def width(self) -> int:
        """Tokens fed when packed."""
        return len(self.prompt) + sum(len(completion) - 1 for completion in self.completions)


@dataclass(frozen=True)
class Packed:
    """Inputs of one forward pass, and where in its output the N predicted tokens are found.

    The N tokens are in the order of the pieces, their completions, their tokens.
    """

    input_ids_RT: Tensor
    position_ids_RT: Tensor
    mask_RT: Tensor | None  # ones and zeros where rows are padded
    groups: list[PackedGroup] | None  # in the one row of `pack`
    row_N: Tensor
    column_N: Tensor
    target_N: Tensor


def split(piece: Piece, max_tokens: int) -> Iterator[Piece]:
    """Cut a group into pieces of at most `max_tokens` (or one completion, if that alone is longer)."""
    start, width = 0, len(piece.prompt)
    for index, completion in enumerate(piece.completions):
        more = len(completion) - 1
        if index > start and width + more > max_tokens:
            yield Piece(piece.prompt, piece.completions[start:index], piece.keys[start:index])
            start, width = index, len(piece.prompt)
        width += more
    yield Piece(piece.prompt, piece.completions[start:], piece.keys[start:])


def micro_batches(pieces: Sequence[Piece], max_tokens: int, *, packed: bool) -> list[list[Piece]]:
    """Pieces of similar width together, each batch at most `max_tokens` (or one piece): in one row if `packed`, else
    with the padding of one row a piece."""
    batches: list[list[Piece]] = []
    filled = 0
    for piece in sorted(pieces, key=lambda piece: -piece.width):  # the first of a batch is its widest
        more = piece.width if packed or not batches else batches[-1][0].width
        if batches and filled + more <= max_tokens:
            batches[-1].append(piece)
            filled += more
        else:
            batches.append([piece])
            filled = piece.width
    return batches


def pack(pieces: Sequence[Piece], device: torch.device, dtype: torch.dtype) -> Packed:
    """One row of all pieces; `dtype` is that of the model's activations, which masks must have."""
    tokens: list[int] = []
    positions: list[int] = []
    columns: list[int] = []
    groups = []
    for piece in pieces:
        start = len(piece.prompt)
        last = len(tokens) + start - 1
        tokens += piece.prompt
        positions += range(start)
        for completion in piece.completions:
            fed = len(completion) - 1
            columns += [last, *range(len(tokens), len(tokens) + fed)]
            tokens += completion[:-1]
            positions += range(start, start + fed)
        groups.append(_place(start, [len(completion) - 1 for completion in piece.completions], device, dtype))
    return Packed(
        torch.tensor([tokens], device=device),
        torch.tensor([positions], device=device),
        None,
        groups,
        torch.zeros(len(columns), dtype=torch.long, device=device),
        torch.tensor(columns, device=device),
        _targets(pieces, device),
    )


def _place(prompt: int, lengths: list[int], device: torch.device, dtype: torch.dtype) -> PackedGroup:
    """The part of a row that a prompt and completions of these lengths take."""
    longest, length_L1 = max(lengths), torch.tensor(lengths)[:, None]
    real_LC = torch.arange(longest) < length_L1
    place_LC = (length_L1.cumsum(0) - length_L1) + torch.arange(longest)
    sees_CK = torch.ones(longest, prompt + longest, dtype=torch.bool).tril(prompt)
    return PackedGroup(
        prompt,
        sum(lengths),
        torch.where(real_LC, place_LC, 0).to(device),
        real_LC.flatten().nonzero().squeeze(-1).to(device),
        torch.zeros(sees_CK.shape, dtype=dtype).masked_fill_(~sees_CK, torch.finfo(dtype).min).to(device),
    )


def pad(pieces: Sequence[Piece], device: torch.device) -> Packed:
    """One row a completion, padded on the right, for models that take no block mask. Pieces have one completion."""
    fed = [[*piece.prompt, *piece.completions[0][:-1]] for piece in pieces]
    width = max(map(len, fed))
    lengths = [len(piece.completions[0]) for piece in pieces]
    return Packed(
        torch.tensor([ids + [0] * (width - len(ids)) for ids in fed], device=device),
        torch.arange(width, device=device).expand(len(fed), width),
        torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in fed], device=device),
        None,
        torch.repeat_interleave(torch.arange(len(fed)), torch.tensor(lengths)).to(device),
        torch.cat([torch.arange(len(ids) - n, len(ids)) for ids, n in zip(fed, lengths, strict=True)]).to(device),
        _targets(pieces, device),
    )


def _targets(pieces: Sequence[Piece], device: torch.device) -> Tensor:
    tokens = [token for piece in pieces for completion in piece.completions for token in completion]
    return torch.tensor(tokens, device=device)
