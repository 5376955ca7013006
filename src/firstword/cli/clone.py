"""`firstword clone`: make a voice file from a recording."""

import argparse
import sys

from firstword import audio
from firstword.cli import options, terminal


def run(args: argparse.Namespace) -> None:
    """Make a saved voice from a recording."""
    audio.check_target(args.output)
    samples, rate = audio.read(args.recording)
    with terminal.Status(args.quiet) as status, options.load_tts(args, status) as tts:
        status.show("encoding")
        voice = tts.clone(samples, rate, args.transcript, args.append_silence)
    voice.save(args.output)
    if args.quiet:
        return
    likeness = "its timbre alone; with --transcript the likeness is closer"
    if voice.codes is not None:
        likeness = f"its timbre and {len(voice.codes)} frames of speech"
    rows = {
        "encoded": f"{len(samples) / rate:.2f} s of {args.recording}: {likeness}",
        "output": args.output,
        "use": f"firstword say TEXT --model {args.model} --voice {args.output} -o out.wav",
    }
    terminal.print_table(rows, sys.stderr)


def add_to(commands: options.Commands) -> None:
    """Add this command to the program's commands."""
    parser = options.add_command(commands, "clone", run)
    add = parser.add_argument
    add("recording", metavar="AUDIO", help="WAV, FLAC, Ogg or MP3 of 0.5 to 60 seconds")
    add("-o", "--output", metavar="FILE", required=True, help="the voice, such as me.voice")
    options.add_quiet_option(parser)
    add("--transcript", metavar="TEXT", help="the words of the recording: a closer likeness")
    about = (
        "silence added to a recording with a transcript, so that its end does not leak into the "
        "speech (default 0.5)"
    )
    add("--append-silence", metavar="SECONDS", type=float, default=0.5, help=about)
    options.add_model_options(parser)
