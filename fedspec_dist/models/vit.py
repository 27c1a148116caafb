"""A small vision transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .network import Network, record
from .text import EncoderBlock


class VitSmall(Network):
    """Patches as tokens, learned positions, encoder blocks, the mean over the patches.

    A. Dosovitskiy et al., "An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale", ICLR 2021,
    without the class token and far smaller.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_outputs: int,
        *,
        patch: int,
        width: int,
        depth: int,
        heads: int,
        dropout: float,
    ) -> None:
        super().__init__()
        if len(input_shape) != 3:
            raise ValueError(f"model: vit_small takes images; the data set's inputs have shape {list(input_shape)}")
        channels, height, columns = input_shape
        if height % patch or columns % patch:
            raise ValueError(
                f"model.patch: got {patch}; allowed is one that divides the images' height and width, which "
                f"are {height}x{columns}"
            )
        if width % heads:
            raise ValueError(f"model.width: got {width} with {heads} heads; allowed is a multiple of model.heads")
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.positions = nn.Parameter(torch.zeros((height // patch) * (columns // patch), width))
        nn.init.normal_(self.positions, std=0.02)
        self.blocks = nn.ModuleList(EncoderBlock(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, num_outputs)

    def backbone(self, images: Tensor, levels: list[Tensor] | None) -> Tensor:  # [B, C, H, W] -> [B, width]
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
            record(levels, x.transpose(1, 2))  # a channel's values over the patches, as of an image
        return self.norm(x).mean(1)
