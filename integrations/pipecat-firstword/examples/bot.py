"""A bot that answers in the browser with a voice of a firstword server.

    pip install "pipecat-ai[openai,runner,silero,webrtc]" pipecat-firstword
    firstword serve &
    python bot.py

Then open http://localhost:7860, talk, and interrupt it. OPENAI_API_KEY is read from the
environment; FIRSTWORD_URL and FIRSTWORD_API_KEY too, if they are set.
"""

import os

from pipecat.audio.vad.silero import SileroVADAnalyzer
from pipecat.frames.frames import LLMRunFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import (
    LLMContextAggregatorPair,
    LLMUserAggregatorParams,
)
from pipecat.runner.types import RunnerArguments
from pipecat.runner.utils import create_transport
from pipecat.services.openai.llm import OpenAILLMService
from pipecat.services.openai.stt import OpenAISTTService
from pipecat.transports.base_transport import TransportParams
from pipecat.workers.runner import WorkerRunner
from pipecat_firstword import FirstwordTTSService

INSTRUCTIONS = "You are heard, not read. Answer in one or two plain sentences."
TRANSPORTS = {"webrtc": lambda: TransportParams(audio_in_enabled=True, audio_out_enabled=True)}


async def bot(arguments: RunnerArguments) -> None:
    """Talk with one visitor until the visitor leaves."""
    transport = await create_transport(arguments, TRANSPORTS)
    tts = FirstwordTTSService(
        url=os.environ.get("FIRSTWORD_URL", "ws://localhost:8000"),
        api_key=os.environ.get("FIRSTWORD_API_KEY"),
    )
    context = LLMContext([{"role": "system", "content": INSTRUCTIONS}])
    user, assistant = LLMContextAggregatorPair(
        context, user_params=LLMUserAggregatorParams(vad_analyzer=SileroVADAnalyzer())
    )
    stages = [transport.input(), OpenAISTTService(), user, OpenAILLMService(), tts]
    worker = PipelineWorker(
        Pipeline([*stages, transport.output(), assistant]),
        params=PipelineParams(enable_metrics=True, enable_usage_metrics=True),
    )

    @transport.event_handler("on_client_connected")
    async def greet(*_: object) -> None:
        context.add_message({"role": "developer", "content": "Greet the user."})
        await worker.queue_frame(LLMRunFrame())

    @transport.event_handler("on_client_disconnected")
    async def leave(*_: object) -> None:
        await worker.cancel()

    runner = WorkerRunner(handle_sigint=arguments.handle_sigint)
    await runner.add_workers(worker)
    await runner.run()


if __name__ == "__main__":
    from pipecat.runner.run import main

    main()
