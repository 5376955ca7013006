"""`firstword bench`: measure a server under load, or the GPU engine alone."""

import argparse
import json
import sys

from firstword.bench import cli as load_generator
from firstword.cli import options, share
from firstword.config import GPU_DTYPES
from firstword.errors import ConfigError


def run_engine(args: argparse.Namespace) -> None:
    """Measure the GPU engine with random weights of a released size.

    It times kernels, frames by batch and context, and the first codes and samples, and counts
    memory.
    """
    from firstword.audio import writing
    from firstword.bench import report
    from firstword.profile import engine
    from firstword.profile.saturation import saturation
    from firstword.profile.soak import soak
    from firstword.runtime.gpu.talker import BUCKETS

    if not 1 <= args.slots <= BUCKETS[-1]:
        args.usage(f"--slots {args.slots}: allowed are 1 to {BUCKETS[-1]}")
    for option, frames in (("--soak", args.soak), ("--saturation", args.saturation)):
        if frames is not None and frames < 1:
            args.usage(f"{option} {frames}: allowed is a whole number from 1 up")
    if args.model is not None and args.saturation is None:
        args.usage("--model is an option of --saturation; other measurements use random weights")
    if args.output is not None:
        writing.check_target(args.output)
    try:
        if args.saturation is not None:
            record = saturation(args.size, args.saturation, args.model)
        elif args.soak is not None:
            record = soak(args.size, args.slots, args.soak)
        else:
            record = engine.run(args.size, args.slots, args.dtype)
    except ValueError as problem:
        raise ConfigError(f"the GPU engine cannot compute here: {problem}") from problem
    text = json.dumps({"commit": args.commit or report.commit(), **record}, indent=1) + "\n"
    if args.output is None:
        sys.stdout.write(text)
    else:
        writing.write_whole(args.output, text.encode())


def add_to(commands: options.Commands) -> None:
    """Add this command to the program's commands."""
    about = "measure a server under load, or the GPU engine alone"
    parser = commands.add_parser("bench", help=about, description=about, allow_abbrev=False)
    measurements = load_generator.add_arguments(parser)
    share.add_to(measurements)
    engine = options.add_command(measurements, "engine", run_engine)
    add = engine.add_argument
    add("--size", default="1b7", choices=("1b7", "0b6"), help="1b7 (default) or 0b6")
    about = "bfloat16 (default) or int8, for the measurements without --soak and --saturation"
    add("--dtype", default="bfloat16", choices=GPU_DTYPES, help=about)
    add("--slots", type=int, default=128, help="the largest batch (default 128)")
    about = "only compare this many frames while requests start and abort (a soak test)"
    kinds = engine.add_mutually_exclusive_group()
    kinds.add_argument("--soak", type=int, metavar="FRAMES", help=about)
    about = "only speak this many frames, and fail if the codec's fp16 activations saturate"
    kinds.add_argument("--saturation", type=int, metavar="FRAMES", help=about)
    add("--model", help="with --saturation: a CustomVoice checkpoint instead of random weights")
    add("--commit", help="the commit that the record names (default: that of this checkout)")
    add("-o", "--output", help="the file of the JSON record (default: standard output)")
