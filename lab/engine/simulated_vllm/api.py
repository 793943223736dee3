"""The OpenAI-compatible routes, answered in the shapes of vLLM."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import json
import os
import time
import traceback
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from simulated_vllm.arguments import Config
from simulated_vllm.client import ENGINE_DEAD, AbortedError, EngineClient, EngineDeadError, Stream
from simulated_vllm.http_server import Request, Response
from simulated_vllm.log import Logger
from simulated_vllm.replies import Reply, Sampling, compose, tool_arguments
from simulated_vllm.settings import Fault, SettingsFile, parse_fault
from simulated_vllm.tokens import (
    TOKEN_BYTES,
    Decoder,
    count,
    encode,
    encode_answer_start,
    encode_image,
    encode_message,
)

LOG = Logger("APIServer")
QUIET_PATHS = ("/health", "/metrics")  # asked every second by those who watch


class APIError(Exception):
    """An answer with an error; `type` as vLLM names it."""

    def __init__(self, status: int, message: str, type_: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": type_, "param": param, "code": status}}


@dataclass(frozen=True)
class Delta:
    """What one step added to a reply, by field of the answer."""

    kind: str  # "reasoning", "content" or "tool"
    text: str
    function: str | None = None  # with the first piece of a tool call


class Deltas:
    """Turns token counts into text: walks a reply's parts as its tokens are produced."""

    def __init__(self, reply: Reply) -> None:
        self._parts = reply.parts
        self._part = 0
        self._offset = 0  # bytes of the current part that are out
        self._decoder = Decoder()
        self._done = 0

    def advance(self, produced: int) -> list[Delta]:
        """The text that came with the tokens up to `produced`."""
        left = (produced - self._done) * TOKEN_BYTES
        self._done = produced
        deltas = []
        while left > 0 and self._part < len(self._parts):
            part = self._parts[self._part]
            piece = part.tokens[self._offset : self._offset + left]
            if part.kind != "hidden":
                first = not self._offset
                text = self._decoder.decode(piece)
                if text or (first and part.function):
                    deltas.append(Delta(part.kind, text, part.function if first else None))
            left -= len(piece)
            self._offset += len(piece)
            if self._offset == len(part.tokens):
                self._part, self._offset, self._decoder = self._part + 1, 0, Decoder()
        return deltas


class API:
    """Handles every request of one engine."""

    def __init__(self, config: Config, settings: SettingsFile, engine: EngineClient) -> None:
        self.config = config
        self.settings = settings
        self.engine = engine
        self._switched_fault: Fault | None = None
        self._created = int(time.time())
        self._routes = {
            ("GET", "/health"): self._health,
            ("GET", "/ping"): self._health,
            ("POST", "/ping"): self._health,
            ("GET", "/version"): self._version,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/v1/models"): self._models,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/v1/completions"): self._completions,
            ("POST", "/lab/fault"): self._lab_fault,
        }

    # -- dispatch ----------------------------------------------------------------------------------------------------

    async def handle(self, request: Request, response: Response) -> None:
        if "origin" in request.headers:
            response.headers["access-control-allow-origin"] = "*"
        try:
            await self._dispatch(request, response)
        except APIError as error:
            await response.send_json(error.status, error.body)
        except EngineDeadError:
            await response.send_json(500, APIError(500, ENGINE_DEAD, "InternalServerError").body)
        except Exception as error:
            LOG.raw(traceback.format_exc())
            if not response.status:
                await response.send_json(500, APIError(500, str(error), "InternalServerError").body)
        finally:
            if self.config.access_log and request.path not in QUIET_PATHS and response.status:
                LOG.raw(f'INFO:     {request.client} - "{request.method} {request.path} HTTP/1.1" {response.status}')

    async def _dispatch(self, request: Request, response: Response) -> None:
        fault = self._fault()
        guarded = request.path.startswith("/v1")
        if request.path != "/lab/fault":
            while "hang" in fault and not self.engine.dead.is_set():
                await asyncio.sleep(0.1)
                fault = self._fault()
            if guarded and "reset" in fault:
                response.reset()
                return
            if guarded and "error_503" in fault:
                raise APIError(503, "simulated overload", "ServiceUnavailableError")
        if request.method == "OPTIONS":
            response.headers["access-control-allow-methods"] = "*"
            response.headers["access-control-allow-headers"] = request.headers.get("access-control-request-headers", "*")
            await response.send(200, b"OK", "text/plain; charset=utf-8")
            return
        if guarded and not self._authorised(request):
            await response.send_json(401, {"error": "Unauthorized"})
            return
        route = self._routes.get((request.method, request.path))
        if route:
            await route(request, response)
        elif any(path == request.path for _, path in self._routes):
            await response.send_json(405, {"detail": "Method Not Allowed"})
        else:
            await response.send_json(404, {"detail": "Not Found"})

    def _fault(self) -> Fault:
        return self._switched_fault or self.settings.current().fault(self.config.port) or {}

    def _authorised(self, request: Request) -> bool:
        if not self.config.api_keys:
            return True
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = key.encode()  # of text that was read as latin-1: keys beyond ASCII fail, as they do with vLLM
        return scheme.lower() == "bearer" and any(hmac.compare_digest(given, known.encode()) for known in self.config.api_keys)

    # -- what is there -----------------------------------------------------------------------------------------------

    async def _health(self, request: Request, response: Response) -> None:
        await response.send(503 if self.engine.dead.is_set() else 200, b"")

    async def _version(self, request: Request, response: Response) -> None:
        await response.send_json(200, {"version": self.config.version})

    async def _metrics(self, request: Request, response: Response) -> None:
        text = self.engine.metrics.render()
        await response.send(200, text.encode(), "text/plain; version=0.0.4; charset=utf-8")

    async def _models(self, request: Request, response: Response) -> None:
        cards = [
            {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": "vllm",
                "root": self.config.model,
                "parent": None,
                "max_model_len": self.config.max_model_len,
                "permission": [],
            }
            for name in self.config.served_names
        ]
        await response.send_json(200, {"object": "list", "data": cards})

    async def _tokenize(self, request: Request, response: Response) -> None:
        body = self._body(request)
        prompt = self._chat_prompt(body)[0] if "messages" in body else self._completion_prompt(body)
        tokens = [int.from_bytes(prompt[at : at + TOKEN_BYTES], "big") for at in range(0, len(prompt), TOKEN_BYTES)]
        value = {"count": len(tokens), "max_model_len": self.config.max_model_len, "tokens": tokens, "token_strs": None}
        await response.send_json(200, value)

    async def _lab_fault(self, request: Request, response: Response) -> None:
        try:
            self._switched_fault = parse_fault(request.json()["fault"])
        except (ValueError, KeyError, TypeError) as error:
            raise APIError(400, f"expected {{'fault': ...}}: {error}") from None
        self.engine.set_fault(self._switched_fault)
        await response.send_json(200, {"fault": self._switched_fault})

    # -- requests to the model ---------------------------------------------------------------------------------------

    def _body(self, request: Request) -> dict[str, Any]:
        """The request's JSON object for a model that is served here."""
        try:
            body = request.json()
        except ValueError as error:
            raise APIError(400, f"Invalid JSON in the request body: {error}") from None
        if not isinstance(body, dict):
            raise APIError(400, "The request body must be a JSON object")
        model = body.get("model")
        if model is not None and model not in self.config.served_names:
            raise APIError(404, f"The model `{model}` does not exist.", "NotFoundError", "model")
        if body.get("n") not in (None, 1):
            raise APIError(400, "the simulated engine gives one choice a request: n must be 1", param="n")
        return body

    def _sampling(self, body: dict[str, Any], prompt: bytes, default_max_tokens: int | None) -> Sampling:
        """Checks the sampling parameters and that prompt and answer fit into the model's length."""
        limit = self.config.max_model_len
        prompt_tokens = count(prompt)
        wanted = body.get("max_completion_tokens") or body.get("max_tokens", default_max_tokens)
        if wanted is not None and (not isinstance(wanted, int) or wanted < 1):
            raise APIError(400, f"max_tokens must be at least 1, got {wanted}.", param="max_tokens")
        if prompt_tokens + (wanted or 1) > limit:
            raise APIError(
                400,
                f"This model's maximum context length is {limit} tokens. However, you requested {wanted or 1} output tokens "
                f"and your prompt contains {prompt_tokens} input tokens, for a total of {prompt_tokens + (wanted or 1)} "
                f"tokens. Please reduce the length of the input prompt or the number of requested output tokens.",
                param="input_tokens",
            )
        temperature = body.get("temperature")
        temperature = 1.0 if temperature is None else temperature
        if not isinstance(temperature, (int, float)) or temperature < 0:
            raise APIError(400, f"temperature must be non-negative, got {temperature}.", param="temperature")
        stop = body.get("stop") or []
        return Sampling(
            max_tokens=wanted or limit - prompt_tokens,
            min_tokens=body.get("min_tokens") or 0,
            ignore_eos=bool(body.get("ignore_eos")),
            temperature=float(temperature),
            seed=body.get("seed"),
            stop=tuple([stop] if isinstance(stop, str) else stop),
        )

    def _usage(self, stream: Stream | None, prompt: bytes) -> dict[str, Any]:
        prompt_tokens, completion = count(prompt), stream.produced if stream else 0
        details = {"cached_tokens": stream.cached_tokens} if stream and self.config.prompt_tokens_details else None
        return {
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": details,
        }

    async def _answer(self, answer: Answer, body: dict[str, Any], response: Response) -> None:
        """Sends a reply, streamed or whole."""
        metrics = self.engine.metrics
        metrics.params_n.observe(1)
        metrics.params_max_tokens.observe(answer.max_tokens)
        ended = "length" if answer.reply.finish_reason == "length" else "stop"  # to the engine a tool call is text
        salt = str(body.get("cache_salt") or "")
        steps = self.engine.generate(answer.id, answer.prompt, answer.reply.tokens, salt, ended)
        if body.get("stream"):
            await self._stream(answer, body, response, steps)
            return
        deltas = Deltas(answer.reply)
        collected: list[Delta] = []
        finish_reason, last = answer.reply.finish_reason, None
        async with aclosing(steps):
            try:
                async for last in steps:
                    collected += deltas.advance(last.produced)
            except AbortedError:
                finish_reason = "abort"
        choice = answer.choice(collected, finish_reason)
        await response.send_json(200, answer.envelope([choice], usage=self._usage(last, answer.prompt)))

    async def _stream(self, answer: Answer, body: dict[str, Any], response: Response, steps: AsyncIterator[Stream]) -> None:
        options = body.get("stream_options") or {}
        include_usage = options.get("include_usage") or self.config.force_include_usage
        continuous = include_usage and options.get("continuous_usage_stats")

        async def event(choices: list[dict[str, Any]], **more: Any) -> None:
            data = json.dumps(answer.envelope(choices, chunk=True, **more), ensure_ascii=False, separators=(",", ":"))
            await response.write(b"data: " + data.encode() + b"\n\n")

        # Headers go out at once, as from vLLM: a proxy learns nothing about a slow or stuck engine from them.
        await response.start(200, "text/event-stream; charset=utf-8")
        deltas = Deltas(answer.reply)
        last: Stream | None = None
        async with aclosing(steps):
            try:
                async for step in steps:
                    if last is None:
                        for choice in answer.opening():
                            await event([choice])
                    last = step
                    more = {"usage": self._usage(last, answer.prompt)} if continuous else {}
                    finished = last.produced == last.wanted
                    pieces: list[Delta | None] = [*deltas.advance(last.produced)]
                    if finished and not pieces:
                        pieces = [None]
                    for number, piece in enumerate(pieces, 1):
                        reason = answer.reply.finish_reason if finished and number == len(pieces) else None
                        await event([answer.piece(piece, reason)], **more)
            except AbortedError:
                await event([answer.piece(None, "abort")])
            except EngineDeadError:
                error = json.dumps(APIError(500, ENGINE_DEAD, "InternalServerError").body)
                await response.write(b"data: " + error.encode() + b"\n\n")
        if include_usage:
            await event([], usage=self._usage(last, answer.prompt))
        await response.write(b"data: [DONE]\n\n")
        await response.end()

    # -- /v1/completions -----------------------------------------------------------------------------------------------

    def _completion_prompt(self, body: dict[str, Any]) -> bytes:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return encode(prompt)
        if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
            return b"".join((token & 0xFFFFFFFF).to_bytes(TOKEN_BYTES, "big") for token in prompt)
        raise APIError(400, "prompt must be a text or a list of token ids; one prompt a request", param="prompt")

    async def _completions(self, request: Request, response: Response) -> None:
        body = self._body(request)
        prompt = self._completion_prompt(body)
        sampling = self._sampling(body, prompt, default_max_tokens=16)
        reply = compose(prompt, sampling, self.settings.current().answer_tokens)
        answer = TextAnswer(self._id("cmpl", request), self._name(body), prompt, reply, sampling.max_tokens)
        await self._answer(answer, body, response)

    # -- /v1/chat/completions ------------------------------------------------------------------------------------------

    def _chat_prompt(self, body: dict[str, Any]) -> tuple[bytes, str]:
        """The prompt of a conversation, and the text of its last user message."""
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise APIError(400, "messages must be a list with at least one message", param="messages")
        pieces, user_text = [], ""
        if body.get("tools"):
            pieces.append(encode_message("tools", [encode(json.dumps(body["tools"]))]))
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise APIError(400, "every message must be an object with a role", param="messages")
            parts, text = self._message_content(message)
            pieces.append(encode_message(message["role"], parts))
            if message["role"] == "user":
                user_text = text
        return b"".join([*pieces, encode_answer_start()]), user_text

    def _message_content(self, message: dict[str, Any]) -> tuple[list[bytes], str]:
        content = message.get("content")
        pieces, texts = [], []
        for part in content if isinstance(content, list) else [{"type": "text", "text": content or ""}]:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "text" and isinstance(part.get("text"), str):
                pieces.append(encode(part["text"]))
                texts.append(part["text"])
            elif kind == "image_url":
                pieces.append(encode_image(checked_image_url(part)))
            else:
                raise APIError(400, f"unknown part of a message: {part!r}"[:300], param="messages")
        if message.get("tool_calls"):
            pieces.append(encode(json.dumps([call.get("function") for call in message["tool_calls"]])))
        return pieces, " ".join(texts)

    def _tool_call(self, body: dict[str, Any], user_text: str) -> tuple[tuple[str, str] | None, str]:
        """The tool call that answers a request, or None, and the finish reason that goes with it.

        With "auto" the model calls a tool when the user has the last word, and reads its result when the tool has.
        """
        tools, choice = body.get("tools") or [], body.get("tool_choice")
        try:
            schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        except (TypeError, KeyError):
            raise APIError(400, "every tool needs a function with a name", param="tools") from None
        choice = ("auto" if schemas else "none") if choice is None else choice
        if choice == "none":
            return None, "stop"
        if not schemas:
            raise APIError(400, "When using `tool_choice`, `tools` must be set.", param="tool_choice")
        named = choice.get("function", {}).get("name") if isinstance(choice, dict) else None
        if named:
            if named not in schemas:
                raise APIError(400, "The tool specified in `tool_choice` does not match any of the specified `tools`")
            return (named, tool_arguments(schemas[named], user_text)), "stop"
        if choice not in ("auto", "required"):
            raise APIError(400, f"Invalid value for `tool_choice`: {choice}!", param="tool_choice")
        if choice == "auto" and not self.config.auto_tools:
            raise APIError(400, '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')
        if choice == "auto" and body["messages"][-1]["role"] != "user":
            return None, "stop"
        name = next((name for name in schemas if name in user_text), next(iter(schemas)))
        return (name, tool_arguments(schemas[name], user_text)), "tool_calls"

    async def _chat(self, request: Request, response: Response) -> None:
        body = self._body(request)
        prompt, user_text = self._chat_prompt(body)
        sampling = self._sampling(body, prompt, default_max_tokens=None)
        call, finish_with_call = self._tool_call(body, user_text)
        reply = compose(
            prompt,
            sampling,
            self.settings.current().answer_tokens,
            thinks=(body.get("chat_template_kwargs") or {}).get("enable_thinking", True),
            reasoning_apart=bool(self.config.reasoning_parser),
            call=call,
            finish_with_call=finish_with_call,
        )
        answer = ChatAnswer(self._id("chatcmpl", request), self._name(body), prompt, reply, sampling.max_tokens)
        await self._answer(answer, body, response)

    def _name(self, body: dict[str, Any]) -> str:
        return body.get("model") or self.config.served_names[0]

    @staticmethod
    def _id(kind: str, request: Request) -> str:
        return f"{kind}-{request.headers.get('x-request-id') or os.urandom(16).hex()}"


def checked_image_url(part: dict[str, Any]) -> str:
    """The URL of an image part; data URLs must hold base64. Nothing is fetched."""
    url = part["image_url"].get("url") if isinstance(part.get("image_url"), dict) else None
    if not isinstance(url, str) or not url.startswith(("data:image/", "http://", "https://")):
        raise APIError(400, "image_url must have a url: data:image/...;base64,... or http(s)://", param="messages")
    if url.startswith("data:"):
        try:
            base64.b64decode(url.partition(";base64,")[2], validate=True)
        except binascii.Error as error:
            raise APIError(400, f"the image is not valid base64: {error}", param="messages") from None
    return url


class Answer:
    """The JSON around a reply."""

    object_whole: str
    object_chunk: str

    def __init__(self, id_: str, model: str, prompt: bytes, reply: Reply, max_tokens: int) -> None:
        self.id = id_
        self.model = model
        self.prompt = prompt
        self.reply = reply
        self.max_tokens = max_tokens
        self.created = int(time.time())

    def envelope(self, choices: list[dict[str, Any]], chunk: bool = False, **more: Any) -> dict[str, Any]:
        kind = self.object_chunk if chunk else self.object_whole
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices, **more}

    def opening(self) -> list[dict[str, Any]]:
        """Choices that are sent before the first token's text."""
        return []

    def choice(self, deltas: list[Delta], finish_reason: str) -> dict[str, Any]:
        """The choice of a whole answer."""
        raise NotImplementedError

    def piece(self, delta: Delta | None, finish_reason: str | None) -> dict[str, Any]:
        """The choice of one streamed chunk."""
        raise NotImplementedError

    def _choice(self, finish_reason: str | None, **more: Any) -> dict[str, Any]:
        stop_reason = self.reply.stop_reason if finish_reason == "stop" else None
        return {"index": 0, **more, "logprobs": None, "finish_reason": finish_reason, "stop_reason": stop_reason}


class TextAnswer(Answer):
    object_whole = object_chunk = "text_completion"

    def choice(self, deltas: list[Delta], finish_reason: str) -> dict[str, Any]:
        return self._choice(finish_reason, text="".join(delta.text for delta in deltas))

    def piece(self, delta: Delta | None, finish_reason: str | None) -> dict[str, Any]:
        return self._choice(finish_reason, text=delta.text if delta else "")


class ChatAnswer(Answer):
    object_whole = "chat.completion"
    object_chunk = "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        return [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}]

    def choice(self, deltas: list[Delta], finish_reason: str) -> dict[str, Any]:
        texts = {kind: "".join(d.text for d in deltas if d.kind == kind) for kind in ("reasoning", "content", "tool")}
        function = next((delta.function for delta in deltas if delta.function), None)
        calls = [self._call(function, texts["tool"])] if function else []
        message = {
            "role": "assistant",
            "content": texts["content"] or None,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "tool_calls": calls,
            "reasoning": texts["reasoning"] or None,
        }
        return self._choice(finish_reason, message=message)

    def piece(self, delta: Delta | None, finish_reason: str | None) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if delta and delta.kind == "tool":
            function = {"name": delta.function, "arguments": delta.text} if delta.function else {"arguments": delta.text}
            call = {"index": 0, "function": function}
            fields["tool_calls"] = [self._call(None, "") | call if delta.function else call]
        elif delta:
            fields[delta.kind] = delta.text
        return self._choice(finish_reason, delta=fields)

    @staticmethod
    def _call(function: str | None, arguments: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-tool-{os.urandom(8).hex()}",
            "type": "function",
            "function": {"name": function, "arguments": arguments},
        }
