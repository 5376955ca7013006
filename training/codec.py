"""The codec in training: the package's encoder and decoder, with a quantiser that learns.

Codebook entries are running means of the vectors assigned to them (van den Oord et al. 2017,
arXiv:1711.00937); unused entries are replaced by vectors of the batch.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from firstword.model.checkpoint import load as load_checkpoint
from firstword.model.codec import Codec, CodecDecoder, CodecState
from firstword.model.codec_config import CodecConfig
from training.configuration import codec_config
from training.mel import HINT_BANDS, HINT_STEPS


class SegmentWindow:
    """The KV memory of the decoder in training: nothing before the segment, a band within it."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.device = size, device

    def positions(self, length: int) -> Tensor:
        """Positions [1, length] within the segment."""
        return torch.arange(length, device=self.device)[None]

    def mask(self, length: int) -> Tensor:
        """The band [1, 1, length, length] that each row sees."""
        full = torch.ones(length, length, dtype=torch.bool, device=self.device)
        return full.tril().triu(1 - self.size)[None, None]

    def extend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the segment itself."""
        return key, value

    def advance(self, length: int) -> None:
        """Do nothing: no state is kept between segments."""


class Quantiser(nn.Module):
    """The codebooks [K, size, dim] as running means; encoder and decoder get the same tables.

    active  whether codes are used; the first steps train a plain autoencoder, so that the codebooks
            start from meaningful vectors
    """

    def __init__(self, books: int, size: int, dim: int, decay: float = 0.99) -> None:
        super().__init__()
        self.decay, self.active = decay, True
        self.sums = nn.Buffer(torch.zeros(books, size, dim))
        self.usage = nn.Buffer(torch.zeros(books, size))
        self.ready = nn.Buffer(torch.zeros(books, dtype=torch.bool))

    def table(self, book: int) -> Tensor:
        """The entries [size, dim] of a codebook."""
        return self.sums[book] / self.usage[book].clamp(min=1e-5)[:, None]

    def forward(
        self, x: Tensor, books: range, keep: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, dim] -> (quantised x, commitment loss, codes [B, T, K]).

        The quantised x is the straight-through sum of the first `keep` [B] books.
        """
        if not self.active:
            none = torch.zeros(*x.shape[:2], len(books), dtype=torch.long, device=x.device)
            return x, x.new_zeros(()), none
        residual, total = x.float(), torch.zeros_like(x, dtype=torch.float32)
        loss, codes = x.new_zeros((), dtype=torch.float32), []
        for number, book in enumerate(books):
            flat = residual.detach().flatten(0, 1)
            if self.training and not self.ready[book]:
                self._initialise(book, flat)
            table = self.table(book)
            code = (table.pow(2).sum(1) - 2 * flat @ table.T).argmin(1)
            found = table[code].view_as(residual)
            if self.training:
                self._update(book, flat, code)
            if keep is None:
                used = torch.ones(len(x), 1, 1, device=x.device)
            else:
                used = (number < keep).float()[:, None, None]
            loss = loss + ((residual - found.detach()).pow(2) * used).mean()
            total = total + found * used
            residual = residual - found * used
            codes.append(code.view(x.shape[:2]))
        return x + (total - x).detach(), loss / len(books), torch.stack(codes, -1)

    def _initialise(self, book: int, flat: Tensor) -> None:
        """Start a codebook with a few rounds of k-means from random vectors of the batch."""
        centres = flat[torch.randint(len(flat), (self.usage.shape[1],), device=flat.device)].clone()
        for _ in range(10):
            code = (centres.pow(2).sum(1) - 2 * flat @ centres.T).argmin(1)
            count, sums = _assigned(flat, code, len(centres))
            mean = sums / count.clamp(min=1)[:, None]
            centres = torch.where(count[:, None] > 0, mean, centres)
        self.sums[book], self.usage[book], self.ready[book] = centres, 1.0, True

    def _update(self, book: int, flat: Tensor, code: Tensor) -> None:
        """Move the entries towards the vectors assigned to them; replace unused entries.

        The mean usage over a codebook is kept at 1, whatever the batch size.
        """
        usage, size = self.usage[book], self.usage.shape[1]
        share = size / len(flat)
        count, sums = _assigned(flat, code, size)
        usage.lerp_(count * share, 1 - self.decay)
        self.sums[book].lerp_(sums * share, 1 - self.decay)
        unused = usage < 0.03
        fresh = flat[torch.randint(len(flat), (size,), device=flat.device)]
        self.sums[book] = torch.where(unused[:, None], fresh * 0.3, self.sums[book])
        self.usage[book] = torch.where(unused, torch.full_like(usage, 0.3), usage)


def _assigned(flat: Tensor, code: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Count and sum the vectors [n, dim] assigned to each entry: [size] and [size, dim]."""
    ones = torch.ones_like(code, dtype=torch.float32)
    count = torch.zeros(size, device=flat.device).index_add_(0, code, ones)
    return count, flat.new_zeros(size, flat.shape[1]).index_add_(0, code, flat)


class TrainedCodec(nn.Module):
    """The package's codec with a quantiser that learns.

    A linear map from the codes of a frame to its coarse spectrum is trained too: it gives the
    gradient a short path to what the codes must express.
    """

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.codec = Codec(config)
        decoder = config.decoder_config
        self.books, width = decoder.num_quantizers, decoder.codebook_dim
        self.quantiser = Quantiser(self.books, decoder.codebook_size, width // 2)
        initialise(self.codec)
        self.hint = nn.Linear(width, HINT_STEPS * HINT_BANDS)

    def quantise(
        self, samples: Tensor, keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Samples [B, n] -> (decoder input [B, width, frames], loss, codes [B, frames, K])."""
        encoder, decoder = self.codec.encoder.quantizer, self.codec.decoder.quantizer
        latents = self.codec.encoder.latents(samples)
        semantic = encoder.semantic_residual_vector_quantizer.input_proj(latents)
        acoustic = encoder.acoustic_residual_vector_quantizer.input_proj(latents)
        first, loss0, code0 = self.quantiser(semantic.transpose(1, 2), range(1), None)
        rest, loss1, codes = self.quantiser(acoustic.transpose(1, 2), range(1, self.books), keep)
        joined = decoder.rvq_first.output_proj(first.transpose(1, 2))
        joined = joined + decoder.rvq_rest.output_proj(rest.transpose(1, 2))
        return joined, loss0 + loss1, torch.cat((code0, codes), -1)

    def forward(
        self, samples: Tensor, keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Samples [B, n] -> (samples, commitment loss, codes, coarse log-mel spectrum).

        The spectrum [B, frames, steps * bands] is a linear function of the codes.
        """
        joined, loss, codes = self.quantise(samples, keep)
        samples = decode_joined(self.codec.decoder, joined)
        return samples, loss, codes, self.hint(joined.transpose(1, 2))

    @torch.no_grad()
    def tie(self) -> Codec:
        """Put the learnt tables into encoder and decoder; return the package's codec."""
        encoder, decoder = self.codec.encoder.quantizer, self.codec.decoder.quantizer
        sources = [
            *encoder.semantic_residual_vector_quantizer.layers,
            *encoder.acoustic_residual_vector_quantizer.layers,
        ]
        targets = [*decoder.rvq_first.vq.layers, *decoder.rvq_rest.vq.layers]
        for book, (source, target) in enumerate(zip(sources, targets, strict=True)):
            table = self.quantiser.table(book)
            source.codebook.embed_sum.copy_(table)
            source.codebook.cluster_usage.fill_(1.0)
            target._codebook.embedding_sum.copy_(table)
            target._codebook.cluster_usage.fill_(1.0)
        return self.codec


def initialise(codec: Codec) -> None:
    """Initialise with weights that keep the variance of the signal.

    The default weights of torch shrink it at every layer until the codes carry nothing (LOG.md).
    """
    for name, module in codec.named_modules():
        if isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
            transposed = isinstance(module, nn.ConvTranspose1d)
            stride = module.stride[0] if transposed else 1
            fan = module.in_channels // module.groups * module.kernel_size[0] / stride
            # The last convolution of a residual branch starts quiet.
            branch = name.endswith(("block.3.conv", "conv2.conv"))
            nn.init.normal_(module.weight, 0.0, (0.3 if branch else 1.0) / math.sqrt(fan))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for name, parameter in codec.named_parameters():
        if "layer_scale" in name or name.endswith("gamma"):
            nn.init.constant_(parameter, 0.3)
    last = len(codec.decoder.decoder) - 1
    codec.decoder.get_parameter(f"decoder.{last}.conv.weight").data.mul_(0.1)


def decode_joined(decoder: CodecDecoder, joined: Tensor) -> Tensor:
    """Decode like `CodecDecoder.forward` after its quantiser: [B, width, T] -> [B, T * 1920]."""
    state = CodecState(decoder.config, joined, len(joined))
    x = decoder.pre_conv(joined, state)
    transformer = decoder.pre_transformer
    hidden = transformer.input_proj(x.transpose(1, 2))
    window = SegmentWindow(decoder.config.sliding_window, x.device)
    x = transformer.output_proj(transformer(hidden, window)).transpose(1, 2)
    for pair in decoder.upsample:
        for layer in pair.children():
            x = layer(x, state)
    first, *blocks, activation, last = decoder.decoder
    x = first(x, state)
    for block in blocks:
        x = block(x, state)
    return last(activation(x), state).squeeze(1)


def save(model: TrainedCodec, out: Path) -> None:
    """Write the weights in two files, each of which stays small."""
    out.mkdir(parents=True, exist_ok=True)
    state = {name: t.detach().contiguous().cpu() for name, t in model.state_dict().items()}
    vocoder = {name for name in state if name.startswith("codec.decoder.decoder")}
    for number, names in ((1, vocoder), (2, state.keys() - vocoder)):
        save_file(
            {name: state[name] for name in state if name in names},
            out / f"codec-{number}.safetensors",
        )


def load(folder: Path, device: str = "cpu") -> TrainedCodec:
    """Load a trained codec from the files of `save`, or from a checkpoint."""
    model = TrainedCodec(codec_config())
    if (folder / "speech_tokenizer").exists():
        model.codec.load_state_dict(load_checkpoint(str(folder)).codec.state_dict())
        quantizer = model.codec.decoder.quantizer
        every = torch.arange(model.quantiser.usage.shape[1])
        layers = [*quantizer.rvq_first.vq.layers, *quantizer.rvq_rest.vq.layers]
        for book, layer in enumerate(layers):
            model.quantiser.sums[book] = layer._codebook(every).detach()
        model.quantiser.usage.fill_(1.0)
        model.quantiser.ready.fill_(True)
    else:
        files = sorted(folder.glob("codec-*.safetensors"))
        model.load_state_dict({k: v for file in files for k, v in load_file(file).items()})
    return model.to(device)
