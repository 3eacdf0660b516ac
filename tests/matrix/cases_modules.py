"""Define torch's layers with parameters."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from tests.matrix.parts import Layer, Stack
from tests.matrix.registry import feature, model
from tests.matrix.sides import Side
from tests.matrix.train import VOCABULARY, WIDTH, floats, images, tokens, train

PLAIN_SGD = functools.partial(torch.optim.SGD, lr=0.05)


class Between(nn.Module):
    """Runs modules one after the other; of a tuple, the first is taken on."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, x: Any) -> Tensor:
        for part in self.parts:
            x = part(x)
            x = x[0] if isinstance(x, tuple) else x
        return x


class Swap(nn.Module):
    """Swaps the last two axes."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


@model("modules", "conv1d")
def conv1d() -> nn.Module:
    return Between(Swap(), nn.Conv1d(WIDTH, 64, 3, padding=1), nn.Tanh(), nn.Conv1d(64, WIDTH, 3), Swap())


@model("modules", "conv2d", data=images)
def conv2d() -> nn.Module:
    return Between(nn.Conv2d(3, 16, 3), nn.Tanh(), nn.Conv2d(16, 32, 3, stride=2), nn.Conv2d(32, 16, 2))


@model("modules", "conv2d_in_groups", data=images)
def conv2d_in_groups() -> nn.Module:
    return Between(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 64, 3, groups=4, padding="same"), nn.Tanh())


@model(
    "modules", "conv3d", data=lambda step: tuple(v.unsqueeze(2).repeat(1, 1, 4, 1, 1) for v in images(step))
)
def conv3d() -> nn.Module:
    return Between(nn.Conv3d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv3d(8, 24, 3))


@model("modules", "conv_transposed", data=images)
def conv_transposed() -> nn.Module:
    return Between(nn.Conv2d(3, 16, 3), nn.Tanh(), nn.ConvTranspose2d(16, 32, 3, stride=2, output_padding=1))


@model("modules", "channels_last", data=images)
def channels_last() -> nn.Module:
    return conv2d().to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch has it


@feature("modules", "channels_last_inputs_and_evaluation")
def channels_last_inputs(side: Side) -> None:
    def data(step: int) -> tuple[Tensor]:
        return (images(step)[0].contiguous(memory_format=torch.channels_last),)

    trainer = train(side, channels_last(), data=data)
    trainer.call.eval()
    with torch.no_grad():
        side.record_share("output", trainer.call(side.share(data(9)[0])))


@model("modules", "lstm")
def lstm() -> nn.Module:
    return Between(nn.LSTM(WIDTH, 32, num_layers=2, batch_first=True), nn.Linear(32, WIDTH))


@model("modules", "lstm_bidirectional_with_projection")
def lstm_projected() -> nn.Module:
    net = nn.LSTM(WIDTH, 32, proj_size=8, bidirectional=True, batch_first=True)
    return Between(net, nn.Linear(16, WIDTH))


@model("modules", "gru")
def gru() -> nn.Module:
    return Between(nn.GRU(WIDTH, 40, batch_first=True), nn.Linear(40, WIDTH))


@model("modules", "rnn")
def rnn() -> nn.Module:
    return Between(nn.RNN(WIDTH, 64, batch_first=True), nn.Linear(64, WIDTH))


@model("modules", "lstm_cell_in_a_loop")
def lstm_cell() -> nn.Module:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.ModuleList([nn.LSTMCell(WIDTH, 32), nn.LSTMCell(32, 32)])

        def forward(self, x: Tensor) -> Tensor:
            state: Any = [None, None]
            for step in x.unbind(1):
                for index, cell in enumerate(self.cells):
                    state[index] = cell(step, state[index])
                    step = state[index][0]
            return step

    return Loop()


class Attention(nn.Module):
    """Attends to itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(48, 4, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


def _wide(step: int) -> tuple[Tensor]:
    return floats(step, 48)


def _evaluated(side: Side, net: nn.Module) -> None:
    """Train, then run the fast path of evaluation and train on."""
    trainer = train(side, net, data=_wide)
    for context in (torch.no_grad(), torch.inference_mode()):
        trainer.call.eval()
        with context:
            side.record_share(type(context).__name__, trainer.call(side.share(_wide(9)[0])).clone())
        trainer.call.train()


@model("modules", "multihead_attention", data=_wide)
def attention() -> nn.Module:
    return nn.Sequential(Attention(), Attention(bias=False))


@model("modules", "multihead_attention_other_widths", data=_wide)
def attention_widths() -> nn.Module:
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(
                48, 4, kdim=20, vdim=10, add_bias_kv=True, batch_first=True
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x[..., :20], x[..., :10])[0]

    return nn.Sequential(Cross(), Cross())


@feature("modules", "multihead_attention_in_evaluation")
def attention_evaluated(side: Side) -> None:
    _evaluated(side, nn.Sequential(Attention(), Attention()))


def _encoder_layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(48, 4, 64, dropout=0.0, batch_first=True)


@model("modules", "transformer_encoder_layer", data=_wide)
def encoder_layer() -> nn.Module:
    return nn.Sequential(_encoder_layer(), _encoder_layer())


@feature("modules", "transformer_encoder_in_evaluation")
def encoder_evaluated(side: Side) -> None:
    _evaluated(side, nn.TransformerEncoder(_encoder_layer(), 2))


@model("modules", "transformer_encoder_and_decoder", data=_wide)
def transformer() -> nn.Module:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Transformer(48, 4, 1, 1, 64, dropout=0.0, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x, x[:, :3])

    return Both()


class Embedded(nn.Module):
    """Embeds tokens some way and runs blocks."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding, self.net = embedding, Stack()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.embedding(x))


@model("modules", "embedding_bag", data=tokens)
def embedding_bag() -> nn.Module:
    return Embedded(nn.EmbeddingBag(200, WIDTH, mode="mean"))


@model("modules", "embedding_with_padding", data=tokens)
def padding() -> nn.Module:
    return Embedded(nn.Embedding(200, WIDTH, padding_idx=3))


@model("modules", "embedding_with_largest_norm", data=tokens, stages=(0, 1, 2))
def largest_norm() -> nn.Module:
    """Write to the weight in the forward pass, at the rows of this rank's tokens: all rows here."""

    class All(Embedded):
        def forward(self, x: Tensor) -> Tensor:
            self.embedding(torch.arange(VOCABULARY))
            return super().forward(x)

    return All(nn.Embedding(VOCABULARY, WIDTH, max_norm=1.0))


@model("modules", "sparse_embedding", data=tokens, optimizer=PLAIN_SGD)
def sparse() -> nn.Module:
    return Embedded(nn.Embedding(200, WIDTH, sparse=True))


@model("modules", "sparse_embedding_bag_used_twice", data=tokens, optimizer=PLAIN_SGD)
def sparse_bag() -> nn.Module:
    class Twice(Embedded):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.embedding(x.flip(1)[:, 1:])

    return Twice(nn.EmbeddingBag(200, WIDTH, mode="sum", sparse=True))


@model("modules", "batch_norm", data=images, same=True)
def batch_norm() -> nn.Module:
    return Between(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.Tanh(), nn.Conv2d(32, 16, 3))


@feature("modules", "batch_norm_in_evaluation")
def batch_norm_evaluated(side: Side) -> None:
    trainer = train(side, batch_norm(), data=images, same=True)
    trainer.call.eval()
    with torch.no_grad():
        side.record("output", trainer.call(images(9)[0]))


@model("modules", "batch_norm_without_statistics", data=images, same=True)
def batch_norm_bare() -> nn.Module:
    return Between(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32, track_running_stats=False), nn.Conv2d(32, 16, 3))


@model("modules", "group_norm", data=images)
def group_norm() -> nn.Module:
    return Between(nn.Conv2d(3, 32, 3), nn.GroupNorm(4, 32), nn.InstanceNorm2d(32, affine=True))


@model("modules", "rms_norm_and_prelu")
def rms_norm() -> nn.Module:
    return Stack(nn.ModuleList([Layer(WIDTH), nn.RMSNorm(WIDTH), nn.PReLU(), Layer(WIDTH)]))


@model("modules", "bilinear")
def bilinear() -> nn.Module:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Bilinear(WIDTH, WIDTH, 10), nn.Bilinear(10, WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x, x), x)

    return Both()


@model("modules", "dropout_with_the_same_seed", same=True)
def dropout() -> nn.Module:
    return Stack(around=lambda layer, x: nn.functional.dropout(layer(x), 0.3))
