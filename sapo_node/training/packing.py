"""Groups to model inputs: a prompt once, its completions behind it, each seeing the prompt and itself only.

One group is one packed sequence. A block mask keeps its completions apart and every completion's positions go on where
the prompt ended, so each token's log-prob is that of an unpacked, unpadded forward pass; the prompt is computed once
instead of L times. Names: R sequences (rows) of T tokens, N tokens to be predicted.

Models that cannot take such a mask get `pad` instead: one completion a row, padded on the right.

The last token of a completion is predicted but never fed: nothing behind it is predicted from it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Longest packed sequence (unless one completion alone is longer): attention is quadratic in it and most of the block
# mask is empty, so beyond this repeating the prompt is cheaper. It also bounds the mask: 2048^2 floats are 16 MiB.
MAX_PACKED_TOKENS = 2048


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
    mask: Tensor  # packed: additive, R x 1 x T x T; padded: R x T of ones and zeros
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


def micro_batches(pieces: Sequence[Piece], max_tokens: int) -> list[list[Piece]]:
    """Pieces of similar width together, each batch at most `max_tokens` with its padding (or one piece)."""
    batches: list[list[Piece]] = []
    for piece in sorted(pieces, key=lambda piece: -piece.width):  # the first of a batch is its widest
        if batches and (len(batches[-1]) + 1) * batches[-1][0].width <= max_tokens:
            batches[-1].append(piece)
        else:
            batches.append([piece])
    return batches


def pack(pieces: Sequence[Piece], device: torch.device, dtype: torch.dtype) -> Packed:
    """One row a piece, padded on the right; `dtype` is that of the model's activations, which the mask must have."""
    width = max(piece.width for piece in pieces)
    tokens, positions, segments = [], [], []
    rows: list[int] = []
    columns: list[int] = []
    for row, piece in enumerate(pieces):
        start = len(piece.prompt)
        ids, places, segment = list(piece.prompt), list(range(start)), [0] * start
        for number, completion in enumerate(piece.completions, start=1):
            fed = len(completion) - 1
            rows += [row] * len(completion)
            columns += [start - 1, *range(len(ids), len(ids) + fed)]
            ids += completion[:-1]
            places += range(start, start + fed)
            segment += [number] * fed
        padding = width - len(ids)
        tokens.append(ids + [0] * padding)
        positions.append(places + [0] * padding)
        segments.append(segment + [-1] * padding)
    return Packed(
        torch.tensor(tokens, device=device),
        torch.tensor(positions, device=device),
        _block_mask(torch.tensor(segments, device=device), dtype),
        torch.tensor(rows, device=device),
        torch.tensor(columns, device=device),
        _targets(pieces, device),
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
        torch.repeat_interleave(torch.arange(len(fed)), torch.tensor(lengths)).to(device),
        torch.cat([torch.arange(len(ids) - n, len(ids)) for ids, n in zip(fed, lengths, strict=True)]).to(device),
        _targets(pieces, device),
    )


def _targets(pieces: Sequence[Piece], device: torch.device) -> Tensor:
    tokens = [token for piece in pieces for completion in piece.completions for token in completion]
    return torch.tensor(tokens, device=device)


def _block_mask(segment_RT: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive R x 1 x T x T mask: a token sees, not later than itself, the prompt (0) and its own segment.

    Padding (-1) sees padding, since a row without anything to see would be NaN.
    """
    width = segment_RT.shape[1]
    causal_TT = torch.ones(width, width, dtype=torch.bool, device=segment_RT.device).tril()
    key_RxT = segment_RT[:, None, :]
    sees_RTT = causal_TT & ((key_RxT == 0) | (key_RxT == segment_RT[:, :, None]))
    mask = torch.zeros(sees_RTT.shape, dtype=dtype, device=segment_RT.device)
    return mask.masked_fill_(~sees_RTT, torch.finfo(dtype).min)[:, None]
