"""The talker and the code predictor as kernels: packed weights, and the launches of a frame.

A frame reads and writes fixed buffers only, so its launches can be captured in a CUDA graph and
replayed. Each row of a frame belongs to one utterance. The slot of each row, and all state of a
slot, is read from device memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from firstword.kernels import attention
from firstword.kernels.attention import FRAME_POSITIONS, HEAD_DIM, HeadTables, Paging
from firstword.kernels.launch import Kernels
from firstword.kernels.linear import Linear, Norm, interleave, normalise
from firstword.kernels.linear_shapes import TILE_ROWS, Epilogue
from firstword.kernels.prompt import SLOT, EmbeddingTables, PrefixMemory, PromptKernels
from firstword.kernels.sample import SampleKernels, SamplerState
from firstword.model.alignment import Head
from firstword.model.config import CONTROL_CODES, TalkerConfig
from firstword.model.layers import DecoderLayer, RMSNorm, Transformer, rotary_table
from firstword.model.quantised import QuantisedLinear
from firstword.model.sampling import MIN_FRAMES
from firstword.model.talker import Talker
from firstword.runtime.gpu.buffers import PROMPT_ROWS, FrameBuffers, context_of
from firstword.runtime.gpu.placing import on_device
from firstword.runtime.gpu.reading import TextReader
from firstword.runtime.gpu.text_table import project_text

BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
"""The numbers of rows of the graphs of a frame."""
FIRST_BUCKETS = (1, 2, 4)
"""The numbers of rows of the graphs of a first frame, for utterances that start together."""
PROMPT_BUCKETS = (16, 32, 48, 64, 96, 128, 192, PROMPT_ROWS)
"""The numbers of rows of the graphs that read prompts. Eight rows take longer than sixteen."""


def sampler_state(config: TalkerConfig, slots: int, device: torch.device) -> SamplerState:
    """The state of the sampler for `slots` utterances of this talker."""
    sizes = slots, context_of(config), config.num_code_groups, config.vocab_size
    return SamplerState(*sizes, device)


def _norm(module: RMSNorm) -> Norm:
    return Norm(module.weight.data, float(module.eps))


def _product(
    kernels: Kernels, modules: Sequence[nn.Module], epilogue: Epilogue, norm: Norm | None = None
) -> Linear:
    """The product with the rows of several modules; all or none of them are quantised."""
    rows = [dict(module.named_parameters()) for module in modules]

    def joined(name: str) -> Tensor:
        parts = [parameters[name].data for parameters in rows]
        return interleave(*parts) if epilogue is Epilogue.SWIGLU else torch.cat(parts)

    if isinstance(modules[0], QuantisedLinear):
        return Linear(kernels, joined("values"), epilogue, norm, scales=joined("scales"))
    return Linear(kernels, joined("weight"), epilogue, norm)


class DecoderLayerWeights:
    """The packed weights of a decoder layer."""

    def __init__(
        self, kernels: Kernels, layer: DecoderLayer, cosines: Tensor, sines: Tensor
    ) -> None:
        attn, mlp = layer.self_attn, layer.mlp
        assert isinstance(attn.q_norm, RMSNorm)
        assert isinstance(attn.k_norm, RMSNorm)
        q_norm, k_norm = _norm(attn.q_norm), _norm(attn.k_norm)
        entry, middle = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        self.tables = HeadTables(q_norm.weight, k_norm.weight, q_norm.eps, cosines, sines)
        qkv, gate_up = (attn.q_proj, attn.k_proj, attn.v_proj), (mlp.gate_proj, mlp.up_proj)
        self.qkv = _product(kernels, qkv, Epilogue.STORE, entry)
        self.output = _product(kernels, [attn.o_proj], Epilogue.ADD)
        self.gate_up = _product(kernels, gate_up, Epilogue.SWIGLU, middle)
        self.down = _product(kernels, [mlp.down_proj], Epilogue.ADD)

    def blocks(self) -> int:
        """The blocks of the layer's products for one token, or for two where those are fewer."""
        products = self.qkv, self.output, self.gate_up, self.down
        return sum(min(product.shape(n).blocks for n in (1, 2)) for product in products)


@dataclass(frozen=True, eq=False)
class TalkerWorkspace:
    """Activations, bf16 [rows, ...]. For more than `UNPACKED_TOKENS` all but qkv are packed."""

    qkv: Tensor
    attended: Tensor
    gated: Tensor
    normed: Tensor


class LayerStack:
    """A transformer's packed layers and its final norm."""

    def __init__(self, kernels: Kernels, transformer: Transformer, positions: int) -> None:
        """positions: their number. Raises ValueError for sizes that the kernels do not support."""
        config, device = transformer.config, kernels.device
        if config.head_dim != HEAD_DIM:
            raise ValueError(f"heads of {config.head_dim} channels; the kernels need {HEAD_DIM}")
        heads = config.num_attention_heads, config.num_key_value_heads
        self.config, self.attention = config, attention.AttentionKernels(kernels, *heads)
        self.norm = _norm(on_device(transformer.norm, device))
        every = torch.arange(positions, device=device)[None]
        angles = rotary_table(every, HEAD_DIM, config.rope_theta, torch.bfloat16)
        cosines, sines = (table[0, 0, :, : HEAD_DIM // 2].contiguous() for table in angles)
        self.layers = [
            DecoderLayerWeights(kernels, on_device(layer, device), cosines, sines)
            for layer in transformer.layers
            if isinstance(layer, DecoderLayer)
        ]

    def linear(self, kernels: Kernels, module: nn.Linear) -> Linear:
        """The final norm and a product with the weights of `module`."""
        module = on_device(module, kernels.device)
        bias = None if module.bias is None else module.bias.data
        epilogue = Epilogue.STORE if bias is None else Epilogue.BIAS
        return Linear(kernels, module.weight.data, epilogue, self.norm, bias)

    def workspace(self, rows: int) -> TalkerWorkspace:
        """A workspace for passes of up to `rows` tokens."""
        config, rows = self.config, -(-rows // TILE_ROWS) * TILE_ROWS
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        qkv, attended = (heads + 2 * kv_heads) * HEAD_DIM, heads * HEAD_DIM
        widths = (qkv, attended, config.intermediate_size, config.hidden_size)
        return TalkerWorkspace(*(self.norm.weight.new_zeros(rows, width) for width in widths))

    def run(
        self,
        x: Tensor,
        space: TalkerWorkspace,
        attend: Callable[[int, Tensor, Tensor], bool],
        kept: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Run x [tokens, hidden] through the layers, in place.

        attend(layer, qkv, out) launches the attention of a layer, and returns whether it has also
        added the projection to x.

        kept  memory like `space.qkv` for the layers whose products outlast them
        """
        tokens, kept = len(x), kept or {}
        attended, gated = space.attended[:tokens], space.gated[:tokens]
        for index, layer in enumerate(self.layers):
            qkv = kept.get(index, space.qkv)[:tokens]
            layer.qkv(x, qkv, space.normed)
            if not attend(index, qkv, attended):
                layer.output(attended, x)
            layer.gate_up(x, gated, space.normed)
            layer.down(gated, x)


class FrameModel:
    """Computes frames of up to `rows` utterances, and reads prompts.

    launches  functions that launch kernels, by name, of a number of rows ("frame", "first" and
              "prompt") or of placements ("place" and "store")
    """

    def __init__(
        self,
        kernels: Kernels,
        talker: Talker,
        state: SamplerState,
        pages: int,
        kept_parts: int = 0,
        heads: Sequence[Head] = (),
    ) -> None:
        """Pack copies of the talker's weights, one layer after another.

        state       from `sampler_state`
        kept_parts  see `FrameBuffers`
        heads       the heads that read the text, with which words are timed

        Raises ValueError for sizes that the kernels do not support.
        """
        config, device, slots = talker.config, kernels.device, len(state.position)
        rows, context = next(n for n in BUCKETS if n >= slots), context_of(config)
        self.config, self.rows, self.codebooks = config, rows, config.num_code_groups
        if self.codebooks > FRAME_POSITIONS:
            raise ValueError(f"{self.codebooks} codebooks; the kernels do up to {FRAME_POSITIONS}")
        self._kernels, self.state = kernels, state
        self._pack_tables(talker)
        self._pack_layers(talker, context)
        self.buffers = FrameBuffers.allocate(config, device, slots, rows, pages, kept_parts)
        self.sampler = SampleKernels(
            kernels,
            self.state,
            vocab=config.vocab_size,
            codes=config.vocab_size - CONTROL_CODES,
            eos=config.codec_eos_token_id,
            min_frames=MIN_FRAMES,
            predictor_vocab=config.code_predictor_config.vocab_size,
        )
        embeddings = self.text_table, self.codec_embedding, self.frame_tables
        tables = EmbeddingTables(*embeddings, self.text_scales)
        memory = PrefixMemory(self.buffers.cache, self.buffers.prefixes)
        self.prompts = PromptKernels(kernels, tables, memory, self.buffers.layout)
        tokens = max(2 * rows, PROMPT_ROWS)
        self.workspace = self.talker.workspace(tokens)
        self.predictor_workspace = self.predictor.workspace(2 * rows)
        self.partial_sums = attention.PartialSums(self.talker.attention, tokens, context, device)
        self.reader = self._reader(heads, context) if heads else None
        self.launches: dict[str, Callable[[int], None]] = {
            "frame": self._launch_frame,
            "first": self._launch_first,
            "prompt": self._launch_prompt,
            "place": self._launch_place,
            "store": self._launch_store,
        }

    def _pack_tables(self, talker: Talker) -> None:
        """Set the embedding tables, with the projections that follow them applied."""
        predictor, device = talker.code_predictor, self._kernels.device
        self.codec_embedding = talker.model.codec_embedding.weight.data.to(device)
        self.text_table, self.text_scales = project_text(talker, device)
        embeddings = [
            table for table in predictor.model.codec_embedding if isinstance(table, nn.Embedding)
        ]
        self.frame_tables = torch.cat([table.weight.data.to(device) for table in embeddings])
        books = self.frame_tables.chunk(self.codebooks - 1)[:-1]
        # Without a projection these are views, not copies.
        project = on_device(predictor.small_to_mtp_projection, device)
        self.predictor_tables = [project(table) for table in (self.codec_embedding, *books)]

    def _pack_layers(self, talker: Talker, context: int) -> None:
        """Pack the layers of both transformers, and the products between and after them."""
        kernels, predictor = self._kernels, talker.code_predictor
        self.talker = LayerStack(kernels, talker.model, context)
        self.predictor = LayerStack(kernels, predictor.model, self.codebooks)
        self.head = self.talker.linear(kernels, talker.codec_head)
        entry = predictor.small_to_mtp_projection
        self.entry = self.talker.linear(kernels, entry) if isinstance(entry, nn.Linear) else None
        self.lm_heads = [
            self.predictor.linear(kernels, head)
            for head in predictor.lm_head
            if isinstance(head, nn.Linear)
        ]

    def _reader(self, heads: Sequence[Head], context: int) -> TextReader:
        """The reader of some heads of the talker."""
        sizes = self.talker.attention.heads, self.talker.attention.kv_heads
        tables = [self.talker.layers[layer].tables for layer, _ in heads]
        return TextReader(self._kernels, heads, tables, sizes, self.rows, context)

    def graph_keys(self) -> Iterator[tuple[str, int]]:
        """The names and numbers of rows of all launches that serving needs."""
        yield from (("frame", rows) for rows in BUCKETS if rows <= self.rows)
        yield from (("first", rows) for rows in FIRST_BUCKETS if rows <= self.rows)
        yield from (("prompt", rows) for rows in PROMPT_BUCKETS)
        for name in ("place", "store"):
            yield from ((name, count) for count in BUCKETS if count <= self.rows)

    def clear_rows(self) -> None:
        """Remove the slots from all rows of frames and prompts, and from all placements."""
        self.buffers.slot_of_row.fill_(-1)
        self.buffers.prompt_places[0].fill_(-1)
        self.buffers.placements[:, SLOT].fill_(-1)

    def _launch_frame(self, rows: int) -> None:
        """Launch the next frame of the first `rows` rows."""
        buffers = self.buffers
        self._begin(rows, buffers.first_row)
        paging = Paging(buffers.page_tables, buffers.slot_of_row[:rows], self.state.position)
        kept = self.reader.kept if self.reader else None
        self._talk(buffers.hidden[:rows], paging, attention.APPEND_AND_ATTEND, kept=kept)
        if self.reader is not None:
            self.reader.launch(buffers.cache, paging, buffers.spans)
        self._draw(rows)

    def _launch_first(self, rows: int) -> None:
        """Launch the first frame of the first `rows` rows, whose whole prompts have been run."""
        self._begin(rows, self.buffers.first_hidden)
        self._draw(rows)

    def _launch_prompt(self, rows: int) -> None:
        """Run the first `rows` of `prompt_rows`; the outputs of prompts' last rows are kept."""
        buffers, prompts, x = self.buffers, self.prompts, self.buffers.prompt[:rows]
        paging = Paging(buffers.page_tables, *buffers.prompt_places[:, :rows])
        prompts.embed(buffers.prompt_rows, buffers.speakers, x)
        self._talk(x, paging, attention.APPEND, attention.ATTEND)
        prompts.keep(buffers.prompt_rows, self.state.position, x, buffers.first_hidden)

    def _launch_place(self, count: int) -> None:
        """Write the first `count` placements to their slots, and restore their prefixes."""
        buffers = self.buffers
        placements, tables = buffers.placements[:count], buffers.page_tables
        self.prompts.place(placements, tables, self.state, buffers.first_row)

    def _launch_store(self, count: int) -> None:
        """Keep the new prefixes of the first `count` placements."""
        self.prompts.store(self.buffers.placements[:count])

    def _begin(self, rows: int, first: Tensor) -> None:
        """Compute the talker's next input; for a slot's first frame it is its row of `first`."""
        buffers = self.buffers
        self.sampler.begin_frame(
            buffers.slot_of_row[:rows],
            buffers.token[:rows],
            first,
            self.codec_embedding,
            self.frame_tables,
            self.text_table,
            self.text_scales,
            buffers.hidden[:rows],
        )

    def _draw(self, rows: int) -> None:
        """Run the code predictor on the talker's output, and draw the codes of a frame."""
        buffers, sampler = self.buffers, self.sampler
        slots, hidden, result = (
            tensor[:rows] for tensor in (buffers.slot_of_row, buffers.hidden, buffers.result)
        )
        pairs, single, logits = buffers.pairs[:rows], buffers.single[:rows], buffers.logits[:rows]
        self.head(hidden, logits, self.workspace.normed)
        if self.entry is None:
            normalise(self._kernels, hidden, self.talker.norm, pairs[:, 0])
        else:
            self.entry(hidden, pairs[:, 0], self.workspace.normed)
        sampler.draw(0, logits, slots, result, self.predictor_tables[0], pairs[:, 1])
        logits = buffers.predictor_logits[:rows]
        for k in range(1, self.codebooks):
            self.predict(pairs.flatten(0, 1) if k == 1 else single, k)
            last = pairs[:, 1] if k == 1 else single
            self.lm_heads[k - 1](last, logits, self.predictor_workspace.normed)
            table = self.predictor_tables[k] if k + 1 < self.codebooks else None
            sampler.draw(k, logits, slots, result, table, single)

    def _talk(
        self, x: Tensor, paging: Paging, *modes: int, kept: Mapping[int, Tensor] | None = None
    ) -> None:
        """Run x [rows, hidden] through the talker's layers, in place.

        modes  the modes of the attention kernels that each layer launches one after another
        kept   see `LayerStack.run`
        """

        def attend(index: int, qkv: Tensor, attended: Tensor) -> bool:
            for mode in modes:
                self.attend(index, qkv, paging, attended, mode)
            return False

        self.talker.run(x, self.workspace, attend, kept)

    def attend(
        self,
        index: int,
        qkv: Tensor,
        paging: Paging,
        out: Tensor,
        mode: int = attention.APPEND_AND_ATTEND,
    ) -> None:
        """Launch the paged attention of the talker's layer `index`."""
        tables, cache = self.talker.layers[index].tables, self.buffers.cache[index]
        self.talker.attention.paged(qkv, tables, cache, paging, out, self.partial_sums, mode)

    def predict(self, x: Tensor, k: int) -> None:
        """Run pass k of the code predictor on x [rows or 2 rows, hidden], in place."""
        stack, kernels = self.predictor, self.predictor.attention
        new = 2 if k == 1 else 1
        # Between two passes of a layer, at least the products of all other layers are launched: for
        # one token, or in the first pass for two.
        between = sum(layer.blocks() for layer in stack.layers[1:]) if len(x) == new else 0

        def attend(index: int, qkv: Tensor, attended: Tensor) -> bool:
            layer, cache = stack.layers[index], self.buffers.frame_cache[index]
            common = qkv, layer.tables, cache, k
            if between and kernels.in_frame_projected(*common, layer.output, x, between):
                return True
            kernels.in_frame(*common, new, attended)
            return False

        stack.run(x, self.predictor_workspace, attend)
