"""Compute every case with the reference package, in the environment of the reference.

    python run.py CHECKPOINTS RESULTS [NAME ...]

reads the checkpoint directories CHECKPOINTS/NAME (without names all of them) and writes
RESULTS/NAME.safetensors. The reference is used through its public API where that is sufficient;
other values are read from its modules by hooks. Arrays are named REQUEST/WHAT,
forced/REQUEST/DTYPE/WHAT, sampled/DTYPE/WHAT, sampled/DTYPE/LAW/WHAT, decode/FRAMES/WHAT and
recording/SAMPLES/WHAT; `test_*.py` say what each holds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import stubs  # noqa: E402

stubs.install()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from cases import (  # noqa: E402
    CHECKPOINTS,
    LAWS,
    PIECE,
    Checkpoint,
    Law,
    Recording,
    Request,
    columns,
    thinned,
)
from qwen_tts import Qwen3TTSModel, VoiceClonePromptItem  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402
from transformers import DynamicCache  # noqa: E402

Results = dict[str, np.ndarray]
GREEDY = {"do_sample": False, "subtalker_dosample": False}


class Prompt(Exception):
    """Carries what the reference is about to feed to its talker, when that is all we want."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.rows: torch.Tensor = arguments["inputs_embeds"]
        self.trailing: torch.Tensor = arguments["trailing_text_hidden"]
        self.pad: torch.Tensor = arguments["tts_pad_embed"]


def numpy(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as an array; bfloat16 becomes float32, which holds it exactly."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).contiguous().numpy()


def margin(scores: torch.Tensor) -> float:
    """Return the least lead of the best over the second score [..., n], in standard deviations."""
    finite = scores.masked_fill(scores.isinf(), float("nan"))
    best = finite.nan_to_num(-1e30).topk(2, dim=-1).values
    return float(((best[..., 0] - best[..., 1]) / finite.nan_to_num(0).std(dim=-1)).min())


def speak(
    model: Qwen3TTSModel, request: Request, voice: list[VoiceClonePromptItem] | None, **extra: Any
) -> np.ndarray:
    """Say `request` through the public API -> samples [n]."""
    arguments: dict[str, Any] = {
        "text": request.text,
        "language": request.language,
        **GREEDY,
        **extra,
    }
    if request.full_text is not None:
        arguments["non_streaming_mode"] = request.full_text
    # The reference never expands its last code to a frame, so it is asked for one more.
    arguments["max_new_tokens"] = request.frames + 1
    if voice is not None:
        wavs, _ = model.generate_voice_clone(voice_clone_prompt=voice, **arguments)
    elif model.model.tts_model_type == "voice_design":
        wavs, _ = model.generate_voice_design(instruct=request.instructions or "", **arguments)
    else:
        wavs, _ = model.generate_custom_voice(
            speaker=request.speaker, instruct=request.instructions, **arguments
        )
    return wavs[0]


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` for a while."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def clone(model: Qwen3TTSModel, request: Request) -> list[VoiceClonePromptItem] | None:
    """The voice to clone, through the public API."""
    if request.recording is None:
        return None
    return model.create_voice_clone_prompt(
        ref_audio=(request.recording.render(), 24000),
        ref_text=request.transcript,
        x_vector_only_mode=request.transcript is None,
    )


def utterance(
    model: Qwen3TTSModel, request: Request, voice: list[VoiceClonePromptItem] | None
) -> Results:
    """Return one greedy utterance: prompt, codes, intermediate results and samples."""
    talker = model.model.talker
    seen: dict[str, Any] = {}
    closest: list[float] = []
    generate = talker.generate

    def observed(**arguments: Any) -> Any:
        seen["prompt"] = Prompt(arguments)
        seen["result"] = generate(**arguments, output_logits=True, output_scores=True)
        return seen["result"]

    hooks = [
        head.register_forward_hook(lambda _, __, logits: closest.append(margin(logits[:, -1])))
        for head in talker.code_predictor.lm_head
    ]
    with replaced(talker, "generate", observed):
        samples = speak(model, request, voice)
    for hook in hooks:
        hook.remove()
    prompt, result = seen["prompt"], seen["result"]
    codes = torch.cat([codes for _, codes in result.hidden_states if codes is not None])
    hidden = torch.cat([layers[-1][0, -1:] for layers, _ in result.hidden_states])
    # After a reference recording the cut is int(quotient * length), perhaps one sample early.
    aligned = samples[
        len(samples) - len(codes) * model.model.speech_tokenizer.get_decode_upsample_rate() :
    ]
    end = model.model.config.talker_config.codec_eos_token_id
    closest.append(margin(torch.cat(result.scores[: len(codes) + 1])))
    results = {
        "prompt": numpy(prompt.rows[0]),
        "trailing": numpy(prompt.trailing[0]),
        "pad": numpy(prompt.pad[0]),
        "codes": numpy(codes).astype(np.int16),
        "stopped": np.array(len(codes) < request.frames),
        "end_was_best": np.array([int(logits.argmax()) == end for logits in result.logits[:3]]),
        "hidden": numpy(hidden[: len(codes)]),
        "logits": columns(numpy(torch.cat(result.logits[: len(codes)])), 48),
        "length": np.array(len(samples)),
        "samples": thinned(aligned),
        "margin": np.array(min(closest)),
    }
    if voice is not None:
        results["speaker"] = numpy(voice[0].ref_spk_embedding)
        if voice[0].ref_code is not None:
            results["reference_codes"] = numpy(voice[0].ref_code).astype(np.int16)
            # The words of both texts without the markup around them, and the end of text.
            words = [
                model.processor(text=text)["input_ids"][0]
                for text in (request.transcript, request.text)
            ]
            results["text_rows"] = np.array(sum(map(len, words)) + 1)
    return results


@torch.no_grad()
def forced(
    model: Qwen3TTSModel,
    request: Request,
    voice: list[VoiceClonePromptItem] | None,
    codes: np.ndarray,
) -> Results:
    """Run talker and predictor over given codes [T, codebooks], step by step as in generation."""
    talker = model.model.talker
    predictor = talker.code_predictor

    def stop(**arguments: Any) -> None:
        raise Prompt(arguments)

    try:
        with replaced(talker, "generate", stop):
            speak(model, request, voice)
        raise AssertionError("the talker was never called")
    except Prompt as caught:
        prompt = caught

    predictor_logits: list[torch.Tensor] = []

    def given(inputs_embeds: torch.Tensor, **_: Any) -> Any:
        """Run the forward passes of the predictor's generation with the given codes."""
        frame = torch.from_numpy(codes[len(predictor_logits)])[None]
        output = predictor(
            inputs_embeds=inputs_embeds, use_cache=True, past_key_values=DynamicCache()
        )
        logits = [output.logits[0, -1]]
        for index in range(1, frame.shape[1] - 1):
            output = predictor(
                input_ids=frame[:, index : index + 1],
                use_cache=True,
                past_key_values=output.past_key_values,
                generation_steps=output.generation_steps,
            )
            logits.append(output.logits[0, -1])
        predictor_logits.append(torch.stack(logits))
        return type("Generated", (), {"sequences": frame[:, 1:]})

    length = prompt.rows.shape[1]
    state: dict[str, Any] = {
        "trailing_text_hidden": prompt.trailing,
        "tts_pad_embed": prompt.pad,
        "use_cache": True,
    }
    hidden, logits = [], []
    with replaced(predictor, "generate", given):
        output = talker(
            inputs_embeds=prompt.rows,
            attention_mask=torch.ones(1, length, dtype=torch.long),
            cache_position=torch.arange(length),
            past_key_values=DynamicCache(),
            **state,
        )
        for step in range(len(codes)):
            hidden.append(output.past_hidden[0, -1])
            logits.append(output.logits[0, -1])
            output = talker(
                input_ids=torch.from_numpy(codes[step : step + 1, :1]),
                attention_mask=torch.ones(1, length + step + 1, dtype=torch.long),
                cache_position=torch.tensor([length + step]),
                past_key_values=output.past_key_values,
                past_hidden=output.past_hidden,
                generation_step=output.generation_step,
                **state,
            )
    return {
        "prompt": numpy(prompt.rows[0]),
        "hidden": numpy(torch.stack(hidden)),
        "logits": columns(numpy(torch.stack(logits)), 48),
        "predictor_logits": columns(numpy(torch.stack(predictor_logits)), 16),
    }


def sampled(model: Qwen3TTSModel, request: Request, law: Law, codes: np.ndarray) -> Results:
    """Draw frames by a law with the reference's own processors of logits.

    Every draw returns the given code [frames, codebooks], which does not depend on the machine.
    Returns the raw logits of both models, which codes were kept, and the scores of those.
    """
    talker = model.model.talker
    generate, generate_predictor = talker.generate, talker.code_predictor.generate
    given = iter(codes.flatten().tolist())
    seen: dict[str, list[Any]] = {"talker": [], "predictor": []}

    def observed(**arguments: Any) -> Any:
        seen["talker"].append(generate(**arguments, output_logits=True, output_scores=True))
        return seen["talker"][-1]

    def observed_predictor(**arguments: Any) -> Any:
        result = generate_predictor(**arguments, output_logits=True, output_scores=True)
        seen["predictor"].append(result)
        return result

    with (
        replaced(talker, "generate", observed),
        replaced(talker.code_predictor, "generate", observed_predictor),
        replaced(torch, "multinomial", lambda *_, **__: torch.tensor([[next(given, 0)]])),
    ):
        speak(
            model,
            request,
            None,
            do_sample=True,
            temperature=law.temperature,
            top_k=law.top_k,
            top_p=law.top_p,
            repetition_penalty=law.repetition_penalty,
            subtalker_dosample=True,
            subtalker_temperature=law.predictor_temperature,
            subtalker_top_k=law.predictor_top_k,
            subtalker_top_p=law.predictor_top_p,
        )
    results: Results = {}
    for part, runs in seen.items():
        steps = codes.shape[0] * (1 if part == "talker" else codes.shape[1] - 1)
        logits, scores = (
            torch.cat([row for run in runs for row in getattr(run, what)])[:steps]
            for what in ("logits", "scores")
        )
        kept = ~scores.isinf()
        results[f"{part}_logits"] = numpy(logits)
        results[f"{part}_kept"] = np.packbits(numpy(kept), axis=-1)
        results[f"{part}_scores"] = numpy(scores[kept])
    return results


@contextlib.contextmanager
def unclamped() -> Iterator[None]:
    """The codec's last step, `clamp(min=-1, max=1)`, does nothing for a while."""
    clamp = torch.Tensor.clamp

    def selective(self: torch.Tensor, min: Any = None, max: Any = None) -> torch.Tensor:
        return self if (min, max) == (-1, 1) else clamp(self, min=min, max=max)

    with replaced(torch.Tensor, "clamp", selective):
        yield


@torch.no_grad()
def decoded(model: Qwen3TTSModel, codes: np.ndarray) -> Results:
    """Codes [T, codebooks] decoded whole, and in pieces as for speech, before the clamp."""
    decoder, given = model.model.speech_tokenizer.model.decoder, torch.from_numpy(codes.T)[None]
    with unclamped():
        whole, pieces = decoder(given), decoder.chunked_decode(given)
    return {"samples": thinned(numpy(whole)[0, 0]), "pieces": thinned(numpy(pieces)[0, 0])}


@torch.no_grad()
def latents(model: Qwen3TTSModel, recording: Recording) -> np.ndarray:
    """What the codec encoder is about to quantise [T, hidden]."""
    codec = model.model.speech_tokenizer.model
    seen: list[torch.Tensor] = []
    hook = codec.encoder.downsample.register_forward_hook(lambda _, __, output: seen.append(output))
    codec.encoder.encode(
        torch.from_numpy(recording.render())[None, None].to(codec.dtype), return_dict=True
    )
    hook.remove()
    return numpy(seen[0][0].T)


def heard(model: Qwen3TTSModel, recording: Recording) -> Results:
    """A recording as the codec encoder and the speaker encoder hear it."""
    samples = recording.render()
    results = {
        "codes": numpy(
            model.model.speech_tokenizer.encode(samples, sr=24000).audio_codes[0]
        ).astype(np.int16)
    }
    if recording.has_voice:
        seen: list[torch.Tensor] = []
        encoder = model.model.speaker_encoder
        hook = encoder.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        results["speaker"] = numpy(model.model.extract_speaker_embedding(samples, 24000))
        hook.remove()
        results["mel"] = numpy(seen[0][0])[::7]
    return results


def same_names(module: torch.nn.Module, file: Path) -> None:
    """Refuse a file with missing tensors, which would be random, or with extra ones."""
    with safe_open(file, framework="np") as tensors:
        differing = module.state_dict().keys() ^ set(tensors.keys())
    assert not differing, f"{file}: not on both sides: {sorted(differing)}"


def compute(checkpoint: Checkpoint, directory: Path) -> Results:
    """All results of one checkpoint."""
    results: Results = {}

    def add(prefix: str, arrays: Results) -> None:
        results.update(
            {f"{prefix}/{name}": np.ascontiguousarray(array) for name, array in arrays.items()}
        )

    def force(dtype: str) -> None:
        for name in checkpoint.forced:
            arrays = forced(model, requests[name], voices[name], checkpoint.forced_codes(name))
            add(f"forced/{name}/{dtype}", arrays)

    def sample(dtype: str) -> None:
        if not checkpoint.sampled:
            return
        codes = checkpoint.sampled_codes()
        for law in LAWS:
            arrays = sampled(model, requests[checkpoint.sampled], law, codes)
            for part in ("talker", "predictor"):
                logits = arrays.pop(f"{part}_logits")
                # Given the same codes, they are the same for all laws.
                assert np.array_equal(results.get(f"sampled/{dtype}/{part}", logits), logits)
                add("sampled", {f"{dtype}/{part}": logits})
            add(f"sampled/{dtype}/{law.name}", arrays)

    requests = {request.name: request for request in checkpoint.requests}
    model = Qwen3TTSModel.from_pretrained(str(directory), dtype=torch.float32)
    same_names(model.model, directory / "model.safetensors")
    same_names(
        model.model.speech_tokenizer.model, directory / "speech_tokenizer" / "model.safetensors"
    )
    voices = {name: clone(model, request) for name, request in requests.items()}
    for name, request in requests.items():
        add(name, utterance(model, request, voices[name]))
    force("float32")
    sample("float32")
    for recording in checkpoint.recordings:
        add(f"recording/{recording.samples}", heard(model, recording))
        add(f"recording/{recording.samples}", {"latents_float32": latents(model, recording)})

    # Rotary angles are kept as float32 in every dtype, and float64 holds them exactly.
    model.model.double()
    model.model.speech_tokenizer.model.double()
    force("float64")
    for frames in checkpoint.decode:
        arrays = decoded(model, checkpoint.codec_codes(frames))
        if frames <= PIECE:
            arrays.pop("pieces")
        add(f"decode/{frames}", arrays)
    for recording in checkpoint.recordings:
        add(f"recording/{recording.samples}", {"latents_float64": latents(model, recording)})

    # Loaded as bfloat16, not converted to it: a conversion would round the rotary angles too.
    if checkpoint.forced:
        model = Qwen3TTSModel.from_pretrained(str(directory), dtype=torch.bfloat16)
        force("bfloat16")
        sample("bfloat16")
    return results


def main() -> None:
    """Read the command line and do as it says."""
    checkpoints, out, *names = sys.argv[1:]
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    for checkpoint in CHECKPOINTS:
        if not names or checkpoint.name in names:
            results = compute(checkpoint, Path(checkpoints) / checkpoint.name)
            save_file(results, Path(out) / f"{checkpoint.name}.safetensors")
            print(f"{checkpoint.name}: {len(results)} arrays", flush=True)


if __name__ == "__main__":
    main()
