"""Small networks for sequences of tokens, of which number 0 is padding: an LSTM and a transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .network import Network, record

PADDING = 0


class LstmText(Network):
    """An embedding, LSTM layers, and a linear layer: on the state after the last token, or on that at each place.

    For next characters this is the network of LEAF (S. Caldas et al., 2018), with its own widths.

    Args:
        outputs: `sequence` for scores `[B, C]`, `tokens` for `[B, T, V]`.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_outputs: int,
        *,
        vocabulary_size: int,
        embedding: int,
        hidden: int,
        layers: int,
        dropout: float,
        outputs: str,
    ) -> None:
        super().__init__()
        _require_sequences("lstm_text", input_shape)
        self.per_token = outputs == "tokens"
        self.embedding = TokenEmbedding(vocabulary_size, embedding)
        widths = [embedding, *[hidden] * (layers - 1)]
        self.layers = nn.ModuleList(LstmLayer(width, hidden) for width in widths)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(hidden, num_outputs)

    def backbone(self, inputs: Tensor, levels: list[Tensor] | None) -> Tensor:  # [B, T] -> [B (, T), hidden]
        states = self.embedding(inputs)
        for number, layer in enumerate(self.layers):
            states = layer(self.dropout(states) if number else states)
        if self.per_token:
            return self.dropout(states)
        last = (inputs != PADDING).sum(1).clamp(min=1) - 1
        return self.dropout(record(levels, states.gather(1, last.view(-1, 1, 1).expand(-1, 1, states.shape[2]))[:, 0]))


class TokenEmbedding(nn.Embedding):
    """A vector for each token; zeros for padding, which has no gradient.

    As with `padding_idx`, whose gradient `torch.func.vmap` gets wrong where each client has an embedding of its own:
    torch 2.14 leaves out the padding of the first alone.
    """

    def __init__(self, vocabulary_size: int, width: int) -> None:
        super().__init__(vocabulary_size, width)
        with torch.no_grad():
            self.weight[PADDING].zero_()

    def forward(self, input: Tensor) -> Tensor:  # [B, T] -> [B, T, width]
        return super().forward(input) * (input != PADDING).unsqueeze(-1)


class LstmLayer(nn.Module):
    """`torch.nn.LSTM` of one layer, with its formulas and its start, in operations that `torch.func` can batch.

    S. Hochreiter, J. Schmidhuber, "Long Short-Term Memory", Neural Computation 9(8), 1997, with forget gates. One bias
    serves where torch's has two, which are added.
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.weight_ih = nn.Parameter(torch.empty(4 * hidden, inputs))
        self.weight_hh = nn.Parameter(torch.empty(4 * hidden, hidden))
        self.bias = nn.Parameter(torch.empty(4 * hidden))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(hidden**-0.5), hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, inputs] -> [B, T, hidden]
        given = functional.linear(x, self.weight_ih, self.bias)
        h = c = torch.zeros_like(given[:, 0, : self.weight_hh.shape[1]])
        states = []
        for step in range(x.shape[1]):
            i, f, g, o = (given[:, step] + functional.linear(h, self.weight_hh)).chunk(4, dim=-1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            states.append(h)
        return torch.stack(states, dim=1)


class TransformerText(Network):
    """A transformer encoder with learned positions; its mean over the tokens, or its output at each place.

    With `outputs: tokens` a place sees those before it only, so that it can tell the next token.

    Args:
        tie_embeddings: the last layer's weights are those of the embedding (with `outputs: tokens`).
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_outputs: int,
        *,
        vocabulary_size: int,
        width: int,
        depth: int,
        heads: int,
        dropout: float,
        outputs: str,
        tie_embeddings: bool,
    ) -> None:
        super().__init__()
        _require_sequences("transformer_text", input_shape)
        if width % heads:
            raise ValueError(f"model.width: got {width} with {heads} heads; allowed is a multiple of model.heads")
        self.per_token = outputs == "tokens"
        self.embedding = TokenEmbedding(vocabulary_size, width)
        self.positions = nn.Parameter(torch.zeros(input_shape[0], width))
        nn.init.normal_(self.positions, std=0.02)
        self.blocks = nn.ModuleList(EncoderBlock(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, num_outputs)
        if tie_embeddings:
            if not self.per_token or num_outputs != vocabulary_size:
                raise ValueError(
                    "model.tie_embeddings: got true without a score for each token; set model.outputs: tokens"
                )
            # As scores' weights, ones of deviation 1 would begin with a loss far above that of a guess.
            nn.init.normal_(self.embedding.weight, std=width**-0.5)
            with torch.no_grad():
                self.embedding.weight[PADDING].zero_()
            self.fc.weight = self.embedding.weight

    def backbone(self, inputs: Tensor, levels: list[Tensor] | None) -> Tensor:  # [B, T] -> [B (, T), width]
        x = self.embedding(inputs) + self.positions
        padding = inputs == PADDING
        for block in self.blocks:
            x = block(x, padding, causal=self.per_token)
            record(levels, x.transpose(1, 2))
        x = self.norm(x)
        if self.per_token:
            return x
        kept = (~padding).to(x.dtype).unsqueeze(2)
        return (x * kept).sum(1) / kept.sum(1).clamp(min=1)


class EncoderBlock(nn.Module):
    """Attention and a two-layer perceptron, each after a norm and added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, padding: Tensor | None = None, causal: bool = False) -> Tensor:  # [B, T, width]
        num_samples, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(num_samples, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5
        # A large number, not infinity: a row of padding alone has a softmax all the same.
        if padding is not None:
            scores = scores.masked_fill(padding[:, None, None], -1e9)
        if causal:
            later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(later, -1e9)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(num_samples, length, width)
        x = x + self.dropout(self.out(mixed))
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))


def _require_sequences(name: str, input_shape: tuple[int, ...]) -> None:
    if len(input_shape) != 1:
        raise ValueError(f"model: {name} reads sequences of tokens [T]; the data set's inputs are {list(input_shape)}")
