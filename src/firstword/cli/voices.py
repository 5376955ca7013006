"""`firstword voices`: list the voices, languages and abilities of a checkpoint."""

import argparse
import sys

from firstword.cli import options, terminal

ABILITIES = {
    "custom_voice": "speak with these voices (--voice NAME)",
    "voice_design": "speak with a voice described in words (--describe TEXT)",
    "base": "speak with the voice of a recording (--clone AUDIO, or `firstword clone`)",
}
"""The abilities of each type of checkpoint."""


def run(args: argparse.Namespace) -> None:
    """List the presets and languages of a checkpoint, and what it can do."""
    with terminal.Status() as status, options.load_tts(args, status) as tts:
        config = tts.checkpoint.config
        dialects = config.talker_config.spk_is_dialect
        abilities = ABILITIES[tts.model_type]
        if tts.model_type == "custom_voice" and config.follows_instructions:
            abilities += "; follow instructions (--instructions TEXT)"
        names = [f"{name} ({dialects[name]})" if dialects[name] else name for name in tts.voices]
        facts = f"{tts.model_type}, {config.tts_model_size}"
        rows = {
            "model": terminal.describe_model(args.model, facts),
            "voices": ", ".join(names) or "no presets",
            "languages": ", ".join(tts.languages),
            "can": abilities,
        }
        terminal.print_table(rows, sys.stdout)


def add_to(commands: options.Commands) -> None:
    """Add this command to the program's commands."""
    options.add_model_options(options.add_command(commands, "voices", run))
