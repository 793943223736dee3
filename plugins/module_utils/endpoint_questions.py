"""The questions an OpenAI-compatible endpoint is asked before anyone relies on it.

They are those of a hand-made acceptance test: health, served name and context length, three temperatures, an exact
`max_tokens`, streaming, token counts, reasoning apart from content, a tool call, the right key, a wrong one and none.
Nothing is judged here: the answers are small dictionaries, and expectations over them are data (see expectations.py).
"""

from __future__ import annotations

import json
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ansible_collections.llmops.ascend.plugins.module_utils.openai_http import Answer, Client

TEMPERATURES = (0.0, 0.5, 1.0)
EXACT_TOKENS = 8
THREADS = 16

WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The current weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name of the city"}},
            "required": ["city"],
        },
    },
}


def ask(endpoint: dict[str, Any], api_key: str | None) -> dict[str, Any]:
    """Ask one endpoint everything its level calls for.

    `endpoint`: {url, model, level: brief | full, reasoning: bool, tools: bool, sessions: int, timeout_s: float,
    wait_s: float}. Returns {level, seconds, health, models} and, for level full, {temperatures, max_tokens, stream,
    reasoning?, tool_call?, wrong_key?, no_key?, sessions?, usages}; the marked ones only where they make sense. An endpoint
    that does not say its models is asked nothing more: every further answer would repeat that one.
    """
    started = time.monotonic()
    client = Client(endpoint["url"], api_key, endpoint["timeout_s"])
    answers: dict[str, Any] = {"level": endpoint["level"], "health": _outcome(client.get("/health"))}
    answers["models"] = _models(client, endpoint["wait_s"])
    if endpoint["level"] == "full" and answers["models"]["names"]:
        answers.update(_ask_everything(client, endpoint, api_key))
    answers["seconds"] = round(time.monotonic() - started, 1)
    return answers


def _ask_everything(client: Client, endpoint: dict[str, Any], api_key: str | None) -> dict[str, Any]:
    model = endpoint["model"]
    answers: dict[str, Any] = {
        "temperatures": [_temperature(client, model, value) for value in TEMPERATURES],
        "max_tokens": _max_tokens(client, model),
        "stream": _stream(client, model),
    }
    if endpoint["reasoning"]:
        answers["reasoning"] = _reasoning(client, model)
    if endpoint["tools"]:
        answers["tool_call"] = _tool_call(client, model)
    if api_key is not None:
        stranger = Client(endpoint["url"], "wrong-" + secrets.token_hex(8), endpoint["timeout_s"])
        nobody = Client(endpoint["url"], None, endpoint["timeout_s"])
        answers["wrong_key"] = _outcome(stranger.get("/v1/models"))
        answers["no_key"] = _outcome(nobody.get("/v1/models"))
    if endpoint["sessions"]:
        answers["sessions"] = _sessions(client, model, endpoint["sessions"])
    answers["usages"] = [
        answer["usage"]
        for answer in answers["temperatures"] + [answers["max_tokens"], answers["stream"]]
        if answer["usage"] is not None
    ]
    return answers


def _models(client: Client, wait_s: float) -> dict[str, Any]:
    """The served names; asked again until it answers, for at most `wait_s` seconds."""
    give_up = time.monotonic() + wait_s
    while True:
        answer = client.get("/v1/models")
        if answer.status == 200 or time.monotonic() >= give_up:
            break
        time.sleep(0.5)
    cards = [card for card in _list(answer.body, "data") if isinstance(card, dict)]
    return _outcome(
        answer,
        names=[card.get("id") for card in cards],
        max_model_len=cards[0].get("max_model_len") if cards else None,
    )


def _temperature(client: Client, model: str, temperature: float) -> dict[str, Any]:
    """Raw completion of a prompt that leaves everything open: a chat's opening words hardly depend on the temperature."""
    answer = client.post(
        "/v1/completions",
        {
            "model": model,
            "prompt": "Words drawn at random from a large dictionary:",
            "max_tokens": 32,
            "temperature": temperature,
            "ignore_eos": True,
        },
    )
    return _outcome(answer, temperature=temperature, text=_choice(answer.body).get("text"), usage=_usage(answer.body))


def _max_tokens(client: Client, model: str) -> dict[str, Any]:
    """`ignore_eos` (vLLM's own) leaves the end to the limit, whatever the model would like."""
    answer = client.post(
        "/v1/chat/completions",
        {
            "model": model,
            "messages": [{"role": "user", "content": "Count from one to one hundred in words."}],
            "max_tokens": EXACT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        },
    )
    return _outcome(answer, finish_reason=_choice(answer.body).get("finish_reason"), usage=_usage(answer.body))


def _stream(client: Client, model: str) -> dict[str, Any]:
    answer = client.post(
        "/v1/chat/completions",
        {
            "model": model,
            "messages": [{"role": "user", "content": "Name the seven days of the week."}],
            "max_tokens": 16,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    )
    chunks = answer.stream.chunks if answer.stream else []
    usages = [usage for usage in map(_usage, chunks) if usage is not None]
    return _outcome(
        answer,
        content_type=answer.headers.get("content-type", "").split(";")[0],
        deltas=sum(bool(_choice(chunk)) for chunk in chunks),
        malformed=answer.stream.malformed if answer.stream else None,
        done=answer.stream.done if answer.stream else False,
        usage=usages[-1] if usages else None,
    )


def _reasoning(client: Client, model: str) -> dict[str, Any]:
    """The field is `reasoning`, and was `reasoning_content` in older vLLM."""
    answer = client.post(
        "/v1/chat/completions",
        {
            "model": model,
            "messages": [{"role": "user", "content": "Which is larger, 9.11 or 9.9? Answer with the number alone."}],
            "max_tokens": 1024,
            "temperature": 0,
        },
    )
    message = _message(answer.body)
    return _outcome(
        answer,
        reasoning=_short(message.get("reasoning") or message.get("reasoning_content")),
        content=_short(message.get("content")),
        finish_reason=_choice(answer.body).get("finish_reason"),
    )


def _tool_call(client: Client, model: str) -> dict[str, Any]:
    answer = client.post(
        "/v1/chat/completions",
        {
            "model": model,
            "messages": [{"role": "user", "content": "What is the weather in Paris now? Use the tool."}],
            "tools": [WEATHER_TOOL],
            "tool_choice": "auto",
            "max_tokens": 1024,
            "temperature": 0,
        },
    )
    calls = _list(_message(answer.body), "tool_calls")
    function = calls[0].get("function") if calls and isinstance(calls[0], dict) else None
    function = function if isinstance(function, dict) else {}
    try:
        arguments = json.loads(function.get("arguments") or "")
    except (TypeError, ValueError):
        arguments = None
    return _outcome(
        answer,
        name=function.get("name"),
        arguments=arguments,
        content=_short(_message(answer.body).get("content")),
        finish_reason=_choice(answer.body).get("finish_reason"),
    )


def _sessions(client: Client, model: str, count: int) -> dict[str, Any]:
    """Two requests in each of `count` new sessions, and where a load balancer sent them.

    Returns {asked, answered, unmarked, sticky, backends}: requests sent, those with status 200, those without an
    `X-Upstream-Addr`, sessions whose two requests went to the same backend, and sessions per backend address.
    """

    def one(_number: int) -> list[Answer]:
        session = {"X-Session-ID": secrets.token_hex(16)}
        question = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        return [client.post("/v1/chat/completions", question, session) for _turn in range(2)]

    with ThreadPoolExecutor(min(count, THREADS)) as pool:
        sessions = list(pool.map(one, range(count)))
    answers = [answer for session in sessions for answer in session]
    backends: dict[str, int] = {}
    sticky = 0
    for first, second in sessions:
        place = _upstream(first)
        if place is not None:
            backends[place] = backends.get(place, 0) + 1
            sticky += place == _upstream(second)
    return {
        "asked": len(answers),
        "answered": sum(answer.status == 200 for answer in answers),
        "unmarked": sum(_upstream(answer) is None for answer in answers),
        "sticky": sticky,
        "count": count,
        "backends": backends,
    }


def _upstream(answer: Answer) -> str | None:
    """The backend that answered: nginx lists every one it tried, separated by commas (its `$upstream_addr`)."""
    return answer.headers.get("x-upstream-addr", "").split(",")[-1].strip() or None


def _outcome(answer: Answer, **details: Any) -> dict[str, Any]:
    """What every answer says: status, an error in words, seconds; and what is particular to it."""
    error = answer.error
    if error is None and answer.status is not None and answer.status >= 400:
        error = _complaint(answer.body)
    return dict({"status": answer.status, "error": error, "seconds": answer.seconds}, **details)


def _complaint(body: Any) -> str | None:
    """The message of an OpenAI error answer: {"error": {"message": ...}} or {"error": "..."}; vLLM's older {"message": ...}."""
    if not isinstance(body, dict):
        return None
    error = body.get("error", body)
    return _short(error.get("message") if isinstance(error, dict) else error)


def _short(text: Any, limit: int = 300) -> Any:
    return text[:limit] if isinstance(text, str) else text


def _list(body: Any, key: str) -> list[Any]:
    value = body.get(key) if isinstance(body, dict) else None
    return value if isinstance(value, list) else []


def _choice(body: Any) -> dict[str, Any]:
    choices = _list(body, "choices")
    return choices[0] if choices and isinstance(choices[0], dict) else {}


def _message(body: Any) -> dict[str, Any]:
    message = _choice(body).get("message")
    return message if isinstance(message, dict) else {}


def _usage(body: Any) -> dict[str, Any] | None:
    usage = body.get("usage") if isinstance(body, dict) else None
    return usage if isinstance(usage, dict) else None
