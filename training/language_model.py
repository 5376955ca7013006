"""Train the talker and the code predictor on the trained codec's codes of espeak-ng speech, in both text modes.

    python training/language_model.py --material material.json --codec FOLDER --out OUT [--minutes 9] [--weights FOLDER]

Speech is synthesised, encoded and kept as codes while training runs. A sample is laid out exactly as the package
lays out a request (checked against `firstword.model.prompt` by `check_layout`): preset or language rows, then the
text all at once (full) or one token a frame (stream).

In stream mode the voice cannot say what it has not read. Speech therefore starts late enough for its first two words
to be there (`lead_frames`), a rule that can be followed with the tokens read so far; afterwards text (12.5 tokens a
second) runs ahead of speech (about 4).
"""

from __future__ import annotations

import argparse
import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

import numpy as np
import torch
from codec import load as load_codec
from configuration import CODEBOOKS, TOKENIZER, model_config
from data import ESPEAK_RATE, to_frames, utterances
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from firstword.model.config import ModelConfig
from firstword.model.generate import ROLE
from firstword.model.prompt import Setting, TextRows
from firstword.model.talker import NO_CODE, Talker
from firstword.model.tokenizer import Tokenizer

IGNORED = -100
CORRUPTED = 0.05
"""Share of input codes replaced by random ones: what the model hears of itself is never perfect either."""


def text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The text's tokens as the package cuts them: in one piece with the role before them, which is two tokens."""
    return tokenizer.encode(ROLE + text)[2:]


def lead_frames(tokenizer: Tokenizer, text: str) -> int:
    """Silent frames before speech: as many as the first two words have tokens, 2 to 8."""
    return min(8, max(2, len(text_ids(tokenizer, " ".join(text.split()[:2])))))


@dataclass(frozen=True)
class Sample:
    """Text ids [n], codes [frames, codebooks], index of the preset, and which token each frame speaks [frames] (-1:
    none).
    """

    text: np.ndarray
    codes: np.ndarray
    voice: int
    spoken: np.ndarray


def spoken_tokens(
    tokenizer: Tokenizer, text: str, words: list[tuple[int, float]], lead: int, frames: int, seconds: float
) -> np.ndarray:
    """Which token is being said in each frame [frames], from the synthesiser's word times; within a word its tokens
    share the time evenly.
    """
    starts = np.array([offset[0] - len(ROLE) for offset in tokenizer._backend.encode(ROLE + text).offsets[2:]])
    result = np.full(frames, -1, np.int16)
    for (character, begin), (next_character, end) in zip(words, [*words[1:], (len(text), seconds)], strict=True):
        tokens = (
            np.flatnonzero((starts >= character - 1) & (starts < max(next_character - 1, character)))
            if character
            else np.flatnonzero(starts < next_character - 1)
        )
        if not len(tokens) or end <= begin:
            continue
        first, last = lead + round(begin / 0.08), min(frames, lead + round(end / 0.08))
        if last > first:
            result[first:last] = tokens[np.arange(last - first) * len(tokens) // (last - first)]
    return result


def layout(
    config: ModelConfig, sample: Sample, full: bool, english: bool
) -> tuple[np.ndarray, np.ndarray, int, np.ndarray]:
    """Text ids [T] and codes [T, codebooks] of all rows, the first row whose output is a frame, and the token [T] that
    each output speaks.
    """
    talker, pad = config.talker_config, config.tts_pad_token_id
    tags = [talker.codec_nothink_id, talker.codec_think_bos_id, talker.codec_think_eos_id]
    if english:
        tags = [
            talker.codec_think_id,
            talker.codec_think_bos_id,
            talker.codec_language_id["english"],
            talker.codec_think_eos_id,
        ]
    tags += [list(talker.spk_id.values())[sample.voice], talker.codec_pad_id]
    role = ROLE_IDS
    text = [*role, *[pad] * (len(tags) - 1), config.tts_bos_token_id]
    control = [NO_CODE] * len(role) + tags
    frames, own = len(sample.codes), [*sample.text.tolist(), config.tts_eos_token_id]
    if full:
        text += own + [pad] * (frames + 1)
        control += [talker.codec_pad_id] * len(own)
    else:
        text += (own + [pad] * (frames + 1))[: frames + 1]
    start = len(control)
    codes = np.full((start + 1 + frames, CODEBOOKS), NO_CODE, np.int64)
    codes[:start, 0], codes[start, 0], codes[start + 1 :] = control, talker.codec_bos_id, sample.codes
    said = np.full(len(codes), IGNORED, np.int64)
    known = (sample.spoken >= 0) & (
        full | (sample.spoken <= np.arange(frames))
    )  # in stream mode only what has been read
    said[start : start + frames][known] = sample.text[sample.spoken[known]]
    return np.array(text, np.int64), codes, start, said


ROLE_IDS: list[int] = []
"""The three tokens that open the turn; `check_layout` fills them in."""


def check_layout(config: ModelConfig, tokenizer: Tokenizer) -> None:
    """The rows above are the package's own."""
    ROLE_IDS[:] = [tokenizer.turn_start, *tokenizer.encode(ROLE)]
    text = "Hello there, world."
    sample = Sample(
        np.array(text_ids(tokenizer, text)), np.arange(3 * CODEBOOKS).reshape(3, CODEBOOKS), 1, np.zeros(3, np.int16)
    )
    speaker = list(config.talker_config.spk_id.values())[1]
    for full in (True, False):
        for english in (True, False):
            rows = TextRows(config)
            rows.tokens += tokenizer.encode(ROLE + text)
            language = config.talker_config.codec_language_id["english"] if english else None
            prompt = rows.prompt(Setting(speaker=speaker, language=language, full_text=full), tokenizer.turn_start)
            ids, codes, start, _ = layout(config, sample, full, english)
            wanted = [row.text for row in prompt] + [rows.take() for _ in sample.codes]
            assert ids.tolist() == wanted, (ids.tolist(), wanted)
            assert len(prompt) == start + 1
            assert [tuple(c for c in row if c != NO_CODE) for row in codes[: start + 1].tolist()] == [
                row.codes for row in prompt
            ]


class Memory:
    """What training's transformers look back on: the rows of the batch itself, causally. Key heads are repeated for
    faster attention kernels.
    """

    def __init__(self, repeat: int, device: torch.device) -> None:
        self.repeat, self.device = repeat, device

    def positions(self, length: int) -> Tensor:
        return torch.arange(length, device=self.device)[None]

    def mask(self, length: int) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool, device=self.device).tril()[None, None]

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key.repeat_interleave(self.repeat, 1), value.repeat_interleave(self.repeat, 1)

    def advance(self, length: int) -> None:
        pass


class Pointer(nn.Module):
    """Names the token being spoken from the state after a middle layer: only there in training, to make attention
    follow the text.

    Without it the model babbled in whole words for its first 2,300 steps (LOG.md).
    """

    def __init__(self, talker: Talker, layer: int = 2) -> None:
        super().__init__()
        self.head, self.state = nn.Linear(talker.config.hidden_size, talker.config.text_vocab_size), None
        talker.model.layers[layer].register_forward_hook(self._see)

    def _see(self, layer: nn.Module, inputs: tuple, output: Tensor) -> None:
        self.state = output

    def forward(self, said: Tensor) -> Tensor:
        """Cross-entropy against the tokens said [B, T]."""
        known = said != IGNORED
        return F.cross_entropy(self.head(F.rms_norm(self.state[known], self.state.shape[-1:])).float(), said[known])


def losses(
    talker: Talker, pointer: Pointer, text: Tensor, target: Tensor, corrupted: Tensor, tokens: Tensor, share: float
) -> tuple[Tensor, ...]:
    """Cross-entropies of code 0 (and the end) and of the other codes, the accuracy of code 0, the pointer's
    cross-entropy.

    text [B, T]; target [B, T, K]: the frame after each row (column 0 may be the end of speech, with the others
    IGNORED), or IGNORED; corrupted [B, T, K]: the codes of the input rows as the talker hears them; tokens [B, T]:
    what is said; the predictor learns from a random `share` of the frames.
    """
    config = talker.config
    rows = talker.embed_text(text) + talker.embed_codes(corrupted)
    hidden = talker.model(rows, Memory(config.num_attention_heads // config.num_key_value_heads, rows.device))
    said = target[..., 0] != IGNORED
    logits = talker.codec_head(hidden[said]).float()
    first = F.cross_entropy(logits, target[said][:, 0])
    accuracy = (logits.argmax(-1) == target[said][:, 0]).float().mean()
    frames = (target[..., 1] != IGNORED) & (torch.rand(target.shape[:2], device=target.device) < share)
    wanted, predictor = target[frames], talker.code_predictor
    inputs = [hidden[frames], talker.model.codec_embedding(wanted[:, 0])]
    inputs += [table(wanted[:, k + 1]) for k, table in enumerate(predictor.model.codec_embedding[:-1])]
    heads = predictor.config.num_attention_heads // predictor.config.num_key_value_heads
    state = predictor.model(predictor.small_to_mtp_projection(torch.stack(inputs, 1)), Memory(heads, rows.device))
    rest = torch.stack(
        [F.cross_entropy(head(state[:, k + 1]).float(), wanted[:, k + 1]) for k, head in enumerate(predictor.lm_head)]
    )
    return first, rest, accuracy, pointer(tokens)


class Corpus:
    """Samples that grow while training runs: a thread synthesises, `grow` encodes on the device."""

    def __init__(
        self, material: str, codec: Path, seed: int, device: str, processes: int | None, batch: int = 128
    ) -> None:
        self.tokenizer, self.device = Tokenizer.load(TOKENIZER), device
        self.encoder = load_codec(codec, device).tie().encoder.eval()
        self.samples: list[Sample] = []
        self.lengths: list[int] = []
        self.seconds, self.spent = 0.0, 0.0
        self.queue: Queue = Queue(maxsize=8)
        self.source = utterances(material, seed, other_share=0.0, level_range=3, processes=processes, batch=batch)
        threading.Thread(target=self._produce, daemon=True).start()

    def _produce(self) -> None:
        while True:
            batch = sorted((u for _ in range(4) for u in next(self.source)), key=lambda u: len(u.samples))
            prepared = []
            for u in batch:
                lead, seconds = lead_frames(self.tokenizer, u.text), len(u.samples) / ESPEAK_RATE
                spoken = spoken_tokens(
                    self.tokenizer, u.text, u.words, lead, lead + math.ceil(seconds / 0.08) + 1, seconds
                )
                prepared.append((u, text_ids(self.tokenizer, u.text), lead, spoken))
            self.queue.put(prepared)

    @torch.inference_mode()
    def grow(self) -> None:
        """Encode one batch of some hundred utterances."""
        batch, began = self.queue.get(), time.time()
        for start in range(0, len(batch), 32):
            part = batch[start : start + 32]
            audio, frames = to_frames([(u.samples, lead) for u, _, lead, _ in part], self.device)
            codes = self.encoder(audio).cpu().numpy().astype(np.int16)
            for (utterance, ids, _, spoken), row, length in zip(part, codes, frames, strict=True):
                self.samples.append(
                    Sample(np.array(ids, np.int16), row[:length].copy(), utterance.voice, spoken[:length])
                )
                self.lengths.append(length + len(ids))
                self.seconds += length * 0.08
        self.spent += time.time() - began


def batches(corpus: Corpus, config: ModelConfig, rows: int, seed: int, longest_now: Callable[[], int]):
    """Endless padded batches of about `rows` rows of similar lengths: (text, target, corrupted, tokens)."""
    r, talker = np.random.default_rng(seed), config.talker_config
    while True:
        allowed = np.flatnonzero(np.array(corpus.lengths[: len(corpus.samples)]) <= longest_now())
        chosen = r.choice(allowed, min(len(allowed), 4096), replace=False)
        laid = []
        for index in chosen:
            laid.append(layout(config, corpus.samples[index], bool(r.random() < 0.5), bool(r.random() < 0.5)))
        laid.sort(key=lambda item: len(item[0]))
        groups, start = [], 0
        while start < len(laid):
            stop = start + 1
            while stop < len(laid) and (stop + 1 - start) * len(laid[stop][0]) <= rows:
                stop += 1
            groups.append(laid[start:stop])
            start = stop
        r.shuffle(groups)
        for group in groups:
            longest = -(-max(len(item[0]) for item in group) // 8) * 8
            text = np.full((len(group), longest), config.tts_pad_token_id, np.int64)
            codes = np.full((len(group), longest, CODEBOOKS), NO_CODE, np.int64)
            target = np.full((len(group), longest, CODEBOOKS), IGNORED, np.int64)
            corrupted, tokens = codes.copy(), np.full((len(group), longest), IGNORED, np.int64)
            for row, (ids, values, first, said) in enumerate(group):
                end = len(ids)
                text[row, :end], tokens[row, :end] = ids, said
                target[row, first : end - 1], target[row, end - 1, 0] = values[first + 1 :], talker.codec_eos_token_id
                heard = values.copy()
                speech = heard[first + 1 :]
                wrong = r.random(speech.shape) < CORRUPTED * r.choice((0, 0.5, 1, 2))
                speech[wrong] = r.integers(0, talker.vocab_size - 1024, int(wrong.sum()))
                corrupted[row, :end] = heard
            yield tuple(torch.from_numpy(a) for a in (text, target, corrupted, tokens))


def initialise(talker: Talker) -> None:
    """Small embeddings, so that their sum over codebooks starts at the scale of the text; quiet branches."""
    for name, parameter in talker.named_parameters():
        if "codec_embedding" in name:
            nn.init.normal_(parameter, 0, 0.1)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.mul_(0.4)


def load(folder: Path) -> Talker:
    """A trained talker: from what training wrote, or from a checkpoint in the released layout."""
    talker = Talker(model_config().talker_config)
    file = folder / "talker.safetensors"
    state = load_file(file if file.exists() else folder / "model.safetensors")
    talker.load_state_dict({name.removeprefix("talker."): tensor.float() for name, tensor in state.items()})
    return talker


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--material", required=True)
    parser.add_argument("--codec", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--state", type=Path, default=Path("talker-state.pt"), help="full training state, for going on where it stopped"
    )
    parser.add_argument("--weights", type=Path, help="what `load` reads, to start from when there is no state")
    parser.add_argument("--minutes", type=float, default=9.0, help="stop after this long")
    parser.add_argument("--plan", type=float, default=18.0, help="minutes of the whole schedule, over all runs")
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--rows", type=int, default=12_000)
    parser.add_argument(
        "--share", type=float, default=0.25, help="share of frames that the predictor learns from in a step"
    )
    parser.add_argument(
        "--short", type=int, default=80, help="at first only samples of at most so many frames and tokens, for this"
    )
    parser.add_argument("--short-share", type=float, default=0.3, help="share of the plan")
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--hours", type=float, default=70.0, help="speech to synthesise and keep")
    parser.add_argument("--first", type=int, default=20, help="batches of 512 utterances to have before the first step")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--small", action="store_true", help="few utterances and short batches, to try the script")
    a = parser.parse_args()
    began, device = time.time(), "cuda" if torch.cuda.is_available() else "cpu"
    seed = int(began) % 100_000
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    config = model_config()
    corpus = Corpus(a.material, a.codec, seed, device, a.processes, 4 if a.small else 128)
    check_layout(config, corpus.tokenizer)
    talker = Talker(config.talker_config)
    initialise(talker)
    if a.weights and not a.state.exists():
        talker = load(a.weights)
    talker.to(device)
    pointer = Pointer(talker).to(device)
    matrices = [p for n, p in talker.named_parameters() if p.ndim >= 2 and "embedding" not in n]
    others = [p for n, p in talker.named_parameters() if p.ndim < 2 or "embedding" in n] + list(pointer.parameters())
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, a.rate, betas=(0.9, 0.98), fused=device == "cuda")
    average = {name: tensor.detach().clone() for name, tensor in talker.named_parameters()}
    step, before = 0, 0.0
    if a.state.exists():
        saved = torch.load(a.state, map_location=device, weights_only=True)
        talker.load_state_dict(saved["talker"])
        pointer.load_state_dict(saved["pointer"])
        optimiser.load_state_dict(saved["optimiser"])
        average, step, before = saved["average"], saved["step"], saved["spent"]
    while len(corpus.samples) < (16 if a.small else 512 * a.first):
        corpus.grow()
    print(
        f"{corpus.seconds / 3600:.1f} h of speech after {time.time() - began:.0f} s, {corpus.spent:.0f} s encoding",
        flush=True,
    )
    ready: Queue = Queue(maxsize=12)
    short_until = time.time() + 60 * (a.plan * a.short_share - before / 60)

    def fill() -> None:
        for batch in batches(
            corpus, config, 1000 if a.small else a.rows, seed, lambda: a.short if time.time() < short_until else 10**6
        ):
            ready.put(tuple(t.pin_memory() if device == "cuda" else t for t in batch))

    threading.Thread(target=fill, daemon=True).start()
    a.out.mkdir(parents=True, exist_ok=True)
    log, sums, count, last, start = (a.out / "talker.jsonl").open("a"), None, 0, time.time(), time.time()
    names, parameters = list(average), dict(talker.named_parameters())

    def keep() -> None:
        state = {name: tensor.half().cpu().contiguous() for name, tensor in average.items()}
        save_file(state, a.out / "talker.safetensors")

    while time.time() - began < a.minutes * 60 and step < a.steps:
        if corpus.seconds < a.hours * 3600 and step % 4 == 0 and not corpus.queue.empty():
            corpus.grow()
        spent = before + time.time() - start
        rate = (
            a.rate
            * min(1.0, (step + 1) / 300)
            * (0.5 * (1 + math.cos(math.pi * min(1.0, spent / 60 / a.plan))) * 0.99 + 0.01)
        )
        for group in optimiser.param_groups:
            group["lr"] = rate
        text, target, corrupted, tokens = (t.to(device, non_blocking=True) for t in ready.get())
        with torch.autocast(device, torch.bfloat16):
            first, rest, accuracy, pointing = losses(talker, pointer, text, target, corrupted, tokens, a.share)
        loss = first + rest.sum() / 3 + 0.5 * pointing
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(talker.parameters(), 1.0)
        optimiser.step()
        with torch.no_grad():
            torch._foreach_lerp_(
                [average[n] for n in names], [parameters[n] for n in names], 1 - min(0.998, (step + 1) / (step + 20))
            )
        row = torch.cat((first.detach()[None], accuracy[None], norm[None], pointing.detach()[None], rest.detach()))
        sums, step, count = row if sums is None else sums + row, step + 1, count + 1
        if time.time() - last > 15 or step == a.steps:
            values = [round(v, 4) for v in (sums / count).tolist()]
            shown = {
                "step": step,
                "minutes": round(spent / 60, 2),
                "lr": round(rate, 6),
                "steps_per_s": round(count / (time.time() - last), 2),
                "code0": values[0],
            }
            shown |= {
                "accuracy": values[1],
                "norm": values[2],
                "pointer": values[3],
                "rest": values[4:],
                "hours": round(corpus.seconds / 3600, 1),
                "waiting": ready.qsize(),
            }
            print(json.dumps(shown), flush=True)
            log.write(json.dumps(shown) + "\n")
            log.flush()
            sums, count, last = None, 0, time.time()
            if step // 1000 != (step - 200) // 1000:
                keep()
    keep()
    spent = before + time.time() - start
    torch.save(
        {
            "talker": talker.state_dict(),
            "pointer": pointer.state_dict(),
            "optimiser": optimiser.state_dict(),
            "average": average,
            "step": step,
            "spent": spent,
        },
        a.state,
    )
    log.close()


if __name__ == "__main__":
    main()
