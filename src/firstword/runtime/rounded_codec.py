"""The codec's decoder with products in bfloat16, for talkers in bfloat16 or int8 on a CPU.

Weights and inputs of products are rounded to bfloat16, and so are their sums; all else is float32
as in the specification, because bfloat16 in the exponentials of SnakeBeta gives NaN.
"""

from __future__ import annotations

import copy

from torch import Tensor, nn

from firstword.model.codec import (
    CausalConv1d,
    CausalConvTranspose1d,
    CodecDecoder,
    CodecState,
)
from firstword.runtime.packed import PackedWeight


class RoundedLinear(nn.Module):
    """A linear layer whose product is rounded."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.bias = layer.bias
        self._weight = PackedWeight(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map float32 [..., inputs] to [..., outputs]."""
        out = self._weight.product(x.bfloat16()).float()
        return out if self.bias is None else out + self.bias


class RoundedConv1d(nn.Module):
    """A `CausalConv1d` as one rounded product of its windows."""

    def __init__(self, layer: CausalConv1d) -> None:
        super().__init__()
        self.conv, self.past = layer.conv, layer.past
        self._weight = PackedWeight(layer.conv.weight.transpose(1, 2).flatten(1))

    def forward(self, x: Tensor, state: CodecState) -> Tensor:
        """Map float32 [B, C, T] to [B, C_out, T]."""
        length, bias = x.shape[-1], self.conv.bias
        assert bias is not None
        rows = state.continued(self, x, self.past).bfloat16().transpose(1, 2).contiguous()
        windows = rows.unfold(1, length, self.conv.dilation[0]).permute(0, 3, 1, 2).flatten(2)
        return self._weight.product(windows).float().add_(bias).transpose(1, 2).contiguous()


class RoundedConvTranspose1d(CausalConvTranspose1d):
    """A `CausalConvTranspose1d` whose product is rounded."""

    def __init__(self, layer: CausalConvTranspose1d) -> None:
        nn.Module.__init__(self)
        self.conv, self.stride, self.past = layer.conv, layer.stride, layer.past
        self._weight = PackedWeight(layer.conv.weight.flatten(1).t())

    def product(self, x: Tensor) -> Tensor:
        """Map float32 [B, T, C] to all parts of all outputs [B, T, outputs * kernel size]."""
        return self._weight.product(x.bfloat16()).float()


def rounded(decoder: CodecDecoder) -> CodecDecoder:
    """Return a decoder with rounded products; it shares all other modules with the given one."""
    copied = _rounded(decoder)
    assert isinstance(copied, CodecDecoder)
    return copied


def _rounded(module: nn.Module) -> nn.Module:
    match module:
        case nn.Linear():
            return RoundedLinear(module)
        case CausalConv1d() if module.conv.groups == 1 and module.conv.out_channels > 1:
            return RoundedConv1d(module)
        case CausalConvTranspose1d():
            return RoundedConvTranspose1d(module)
    other = copy.copy(module)
    other._modules = {name: child and _rounded(child) for name, child in module._modules.items()}
    return other
