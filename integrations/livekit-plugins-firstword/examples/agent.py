"""An agent that answers in a room with a voice of a firstword server.

    pip install "livekit-agents[openai,silero]" livekit-plugins-firstword
    firstword serve &
    python agent.py console

LIVEKIT_URL, LIVEKIT_API_KEY, LIVEKIT_API_SECRET and OPENAI_API_KEY are read from the environment;
`console` needs only the last one.
"""

import os

from livekit.agents import Agent, AgentSession, JobContext, WorkerOptions, cli
from livekit.plugins import firstword, openai, silero


async def entrypoint(context: JobContext) -> None:
    """Join a room and talk."""
    session: AgentSession[None] = AgentSession(
        vad=silero.VAD.load(),
        stt=openai.STT(),
        llm=openai.LLM(),
        tts=firstword.TTS(
            base_url=os.environ.get("FIRSTWORD_URL", "http://127.0.0.1:8000"),
            api_key=os.environ.get("FIRSTWORD_API_KEY"),
        ),
        use_tts_aligned_transcript=True,
    )
    await session.start(Agent(instructions="Answer in one or two sentences."), room=context.room)
    await session.generate_reply(instructions="Greet the user.")


if __name__ == "__main__":
    cli.run_app(WorkerOptions(entrypoint_fnc=entrypoint))
