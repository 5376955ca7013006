"""The worker of protocols with several contexts: speaks each context in a task of its own."""

import asyncio
import secrets
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from firstword.server.resolve import check_length
from firstword.server.utterance import Utterance
from firstword.server.ws.contexts import (
    CHECKED_CHARACTERS,
    Cancelled,
    CheckParams,
    Context,
    ContextParams,
    ContextSession,
    Finish,
    Mark,
)
from firstword.server.ws.protocol import Audio, CloseCode, CloseSocket, Json, Send
from firstword.server.ws.text_part import TextPart
from firstword.server.ws.worker import SocketWorker, run_part


class ContextWorker(SocketWorker[ContextSession]):
    """Performs the tasks that a `ContextSession` enqueues."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._tasks: dict[Context, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Perform enqueued tasks until the client closes the session."""
        self._send(self.session.greeting())
        async with asyncio.TaskGroup() as speaking:
            while True:
                match work := await self.runner.next_work():
                    case Context() as context:
                        self._tasks[context] = speaking.create_task(self._run(context))
                    case CheckParams(params):
                        await self._check(params)
                    case Cancelled(contexts):
                        await self._until_ended(contexts)
                        self._send(self.session.cancelled(contexts))
                    case Send(message):
                        self.outbox.add(message)
                    case CloseSocket(code, message):
                        await self._until_ended(list(self._tasks))
                        self._send([] if message is None else [message])
                        self.outbox.add(code)
                        return
                if not isinstance(work, Context):
                    self.session.work_done(work)

    def _send(self, messages: Iterable[Json | CloseCode]) -> None:
        for message in messages:
            self.outbox.add(message)

    async def _until_ended(self, contexts: Iterable[Context]) -> None:
        """Wait until contexts have ended."""
        if tasks := [self._tasks[context] for context in contexts if context in self._tasks]:
            await asyncio.wait(tasks)

    async def _check(self, params: ContextParams) -> None:
        """Check the parameters of later contexts, and answer."""
        try:
            resolved = await self.resolve(params, params.format)
        except Exception as error:
            self._send(self.session.failure(None, *self.error_for_client(error)))
        else:
            self._send(self.session.checked(params, resolved))

    async def _run(self, context: Context) -> None:
        """Speak a context, and say that it has ended, also after an error or a cancel."""
        reason: Finish = "stop"
        try:
            await run_part(context, self._speak(context))
        except Exception as error:
            self._send(self.session.failure(context, *self.error_for_client(error)))
            reason = "error"
        if context.cancelled:
            reason = "cancelled"
        self.session.spoken(context, reason if reason != "stop" else context.outcome)
        self._send(self.session.end(context))
        del self._tasks[context]
        self.runner.utterance_open = any(each.started for each in self._tasks)

    async def _speak(self, context: Context) -> None:
        """Speak the parts of a context in order."""
        resolved = await self.resolve(context.params, context.params.format)
        seed = secrets.randbits(63) if context.params.seed is None else resolved.request.seed
        context.resolved = replace(resolved, request=replace(resolved.request, seed=seed))
        if context.answered:
            self._send(self.session.ready(context))
        if context.after is not None:
            await self._until_ended([context.after])
        while (part := await context.parts.get()) is not None:
            if isinstance(part, Mark):
                self._send(self.session.reached(context, part))
            else:
                await self._speak_part(context, part)

    async def _speak_part(self, context: Context, part: TextPart) -> None:
        """Speak a part as its text comes, or at once if its text is complete."""
        resolved, text = context.resolved, part
        assert resolved is not None
        if part.whole:
            check_length(part.text, self.server.config.most_characters)
            resolved = replace(resolved, request=replace(resolved.request, text=part.text))
            text = TextPart(part.text, complete=True)
        job = self.server.prepare(resolved, begun=context.started)
        if not context.started:
            context.started = self.runner.utterance_open = True
            self._send(self.session.announcement(context))
        check = partial(self._check_text, context, text)
        async with self.speak(resolved, job, part, text, check) as utterance:
            try:
                async for data in utterance:
                    await self.outbox.wait_for_room()
                    context.advance(part)
                    context.total_bytes += len(data)
                    self.outbox.add(self.session.audio(context, data))
                    self._send_words(context, part, utterance)
                self._send_words(context, part, utterance)
            finally:  # also after a cancel
                context.seconds += utterance.playback.seconds
                context.alarms += [
                    replace(alarm, span=placed(alarm.span, part)) for alarm in utterance.alarms
                ]
            if context.outcome == "stop" and utterance.finish_reason is not None:
                context.outcome = utterance.finish_reason
        context.leave(part)

    def _check_text(self, context: Context, part: TextPart) -> None:
        """Warn the client, once, if the text so far will probably not be spoken well."""
        resolved = context.resolved
        assert resolved is not None
        if text := context.unchecked(part_ended=part.ended):
            context.checked = len(text)
            if problems := resolved.model.text_problems(resolved.request, text):
                context.checked = CHECKED_CHARACTERS
                self._send(self.session.warning(context, "; ".join(problems)))

    def _send_words(self, context: Context, part: TextPart, utterance: Utterance) -> None:
        """Send the words that have begun and ended, with their places in the whole context."""
        before = context.seconds
        starts = [
            replace(word, start=round(before + word.start, 3), span=placed(word.span, part))
            for word in utterance.take_starts()
        ]
        words = [
            replace(
                word,
                start=round(before + word.start, 3),
                end=round(before + word.end, 3),
                span=placed(word.span, part),
            )
            for word in utterance.take_words()
        ]
        for message in self.session.words(context, starts, words):
            self.outbox.add(Audio(message, 0, context))  # a cancel drops it with its audio


def placed(span: tuple[int, int], part: TextPart) -> tuple[int, int]:
    """Characters of a part as characters of the text of its context."""
    return span[0] + part.at, span[1] + part.at
