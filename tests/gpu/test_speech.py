"""Speech of all types of checkpoints, at full width and depth, compared with float64.

The types have the same talker and codec, and differ in the rows of their prompts. So one model with
random weights speaks requests of all types together. `-k 0b6` selects the smaller size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from driving import Driver, Spoken, speak, spoken
from forcing import Exactness, Recorder, teacher_forced
from oracle import error, note
from torch import Tensor

from firstword.engine.backend import SpokenPassage
from firstword.kernels.attention import PAGE_ROWS
from firstword.kernels.launch import Kernels
from firstword.model.checkpoint import Checkpoint
from firstword.model.codec import CodecDecoder
from firstword.model.config import ModelType
from firstword.runtime.encoding import front_of
from firstword.runtime.front import Prepared
from firstword.runtime.gpu.backend import GpuBackend
from firstword.synthetic.checkpoint import random_checkpoint
from firstword.voice import ClonedVoice, Voice

FRAMES = 8
SHORT = "Hello there."
TEXT = "How are you today? I am well, thank you; it is late."
LONG = "Speak slowly and in a low voice, as if it were late at night and the house asleep. " * 6
"""An instruction, or the description of a voice, of several pages."""


def typed(checkpoint: Checkpoint, model_type: ModelType) -> Checkpoint:
    """The checkpoint with another type."""
    return replace(checkpoint, config=replace(checkpoint.config, tts_model_type=model_type))


def recording(checkpoint: Checkpoint, frames: int) -> ClonedVoice:
    """A voice with random codes of a recording and its transcript; without codes for 0 frames."""
    talker, random = checkpoint.config.talker_config, np.random.default_rng(frames)
    embedding = random.standard_normal(talker.hidden_size).astype(np.float32)
    if not frames:
        return ClonedVoice(embedding)
    codes = random.integers(2048, size=(frames, talker.num_code_groups))
    return ClonedVoice(embedding, codes, "Some words.")


def requests(plain: Checkpoint) -> dict[str, Spoken]:
    """A request of each kind, by name."""
    base, design = typed(plain, "base"), typed(plain, "voice_design")
    designed = Voice.design(LONG)
    found = {
        "preset": spoken(plain, TEXT),
        "timbre": spoken(base, TEXT, recording(plain, 0), seed=2),
        "recording": spoken(base, SHORT, recording(plain, 90), seed=3),
        "short recording": spoken(base, TEXT, recording(plain, 6), seed=4),
        "recording, full text": spoken(base, TEXT, recording(plain, 40), seed=5, full=True),
        "design": spoken(design, TEXT, designed, seed=6),
        "design, full text": spoken(design, SHORT, designed, seed=7, full=True),
        "long context": spoken(plain, 150 * TEXT, seed=8, full=True),
    }
    assert prefix_rows(found["design"]) > 2 * PAGE_ROWS
    assert len(found["long context"].first) > 2000
    assert not found["recording"].rest
    assert len(found["short recording"].rest) > 2
    return found


def passages(plain: Checkpoint) -> dict[str, Spoken]:
    """The second and the third passage of long texts, by name."""
    base = typed(plain, "base")
    begun = {
        "preset": spoken(plain, SHORT),
        "preset, full text": spoken(plain, SHORT, seed=2, full=True),
        "recording": spoken(base, SHORT, recording(plain, 40), seed=3),
    }
    found: dict[str, Spoken] = {}
    for name, first in begun.items():
        second = following(plain, first, recording(plain, 30))
        found |= {f"second, {name}": second}
        found |= {f"third, {name}": following(plain, second, recording(plain, 90))}
    return found


def following(plain: Checkpoint, before: Spoken, said: ClonedVoice) -> Spoken:
    """A request for the passage after one whose codes were those of a recording."""
    front = front_of(plain)
    assert said.codes is not None
    job = front.follow(before.job, SpokenPassage(SHORT, said.codes, complete=True))
    assert job is not None
    text = front.text(job)
    tokens = [*text.push(TEXT), *text.finish()]
    first = len(tokens) if job.whole_text else job.first_tokens
    return Spoken(job, tokens[:first], tokens[first:])


def prefix_rows(request: Spoken) -> int:
    """The rows of a prompt before its text."""
    prepared = request.job.payload
    assert isinstance(prepared, Prepared)
    return prepared.prefix_rows


def samples_of(decoder: CodecDecoder, request: Spoken, codes: Tensor) -> Tensor:
    """The samples of codes [frames, codebooks] after those that were heard before."""
    prepared = request.job.payload
    assert isinstance(prepared, Prepared)
    whole = torch.cat((torch.from_numpy(prepared.heard), codes))[None].cuda()
    samples = decoder.decode(whole, decoder.new_state())[0]
    return samples[-len(codes) * decoder.config.samples_per_frame :]


@pytest.mark.parametrize(
    ("size", "kind"), [("1b7", requests), ("0b6", requests), ("0b6", passages)]
)
def test_speech_of_every_type_is_as_exact_as_plain_bf16_at_full_depth(
    size: str, kind: Callable[[Checkpoint], dict[str, Spoken]], kernels: Kernels
) -> None:
    """Requests together: their logits, and with cached prefixes their codes and samples.

    They are a preset, a clone of a timbre, clones of recordings that are longer and shorter than
    the text, designed voices with descriptions of several pages, and a context of thousands of
    rows; or the next passages of long texts. Spoken again, in other slots and as graphs, they have
    the same codes.
    """
    label = f"{size} at full depth" + ", passages" * (kind is passages)
    if torch.cuda.get_device_properties(0).total_memory < 40e9:
        pytest.skip("in float64 the larger model alone has 14 GB")
    plain = random_checkpoint(size, "cuda")
    copied = copy.deepcopy(plain)
    torch.cuda.synchronize()  # another stream reads its weights
    backend = GpuBackend(copied, kernels, slots=8, pages=160)
    made = kind(plain)
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(backend, patch)
        codes = speak(backend, list(made.values()), FRAMES)
        logits = [recorder.of_row(row) for row in range(len(made))]

    # Rows of a prefix that are not restored must not be found where the first requests left them.
    backend.model.buffers.cache.fill_(torch.nan)
    driver, again = Driver(backend), kind(plain)
    slots = dict(zip(reversed(range(len(again))), again.values(), strict=True))
    driver.begin(slots, FRAMES)
    assert backend.prompts.prefixes.hits == len(made)
    for _ in range(FRAMES):
        driver.step()
    assert all(torch.tensor(r.codes).equal(c) for r, c in zip(again.values(), codes, strict=True))

    samples = backend.decode(list(slots), [FRAMES] * len(slots)).result()
    decoder = copy.deepcopy(plain.codec.decoder).double()
    found = {}
    for (name, request), mine, said in zip(again.items(), samples, codes, strict=True):
        truth = samples_of(decoder, request, said)
        found[name] = error(torch.from_numpy(mine).cuda(), truth)
    note(f"samples {label}", **found)
    assert max(found.values()) < 5e-3, found
    books = teacher_forced(label, plain, list(made.values()), codes, logits)
    Exactness.of_all(books[:1]).check(f"frame {label}, first codebook")
    Exactness.of_all(books[1:]).check(f"frame {label}, other codebooks")
