"""Talking to a stub (or to vLLM) without an event loop, for tests and demos. Each wait has a deadline."""

import contextlib
import http.client
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

ANSWER_S = 10.0
"""Until an answer's next byte, and until a process is gone."""


class Answer(NamedTuple):
    """Status, headers and body of one answer; the body is decoded where it is JSON."""

    status: int
    headers: Mapping[str, str]
    body: Any


class Client:
    """The HTTP API on one local port."""

    def __init__(self, port: int = 0) -> None:
        self.port = port

    def request(self, method: str, path: str, body: Any = None, *, timeout_s: float = ANSWER_S) -> Answer:
        """One request with its whole answer; raises `TimeoutError` or another `OSError`."""
        with contextlib.closing(self._connection(timeout_s)) as connection:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json"})
            response = connection.getresponse()
            raw = response.read()
            decoded = json.loads(raw) if raw and "json" in response.headers.get("Content-Type", "") else raw
            return Answer(response.status, dict(response.headers), decoded)

    def get(self, path: str, *, timeout_s: float = ANSWER_S) -> Answer:
        """A GET request."""
        return self.request("GET", path, timeout_s=timeout_s)

    def post(self, path: str, body: Any = None, *, timeout_s: float = ANSWER_S) -> Answer:
        """A POST request."""
        return self.request("POST", path, body, timeout_s=timeout_s)

    def knobs(self, **changes: Any) -> None:
        """Set knobs; what is requested after meets them."""
        answer = self.post("/stub/knobs", changes)
        assert answer.status == 200, answer

    def generate(
        self, token_ids: Sequence[int], max_tokens: int, *, timeout_s: float = ANSWER_S, **params: Any
    ) -> Answer:
        """A whole greedy generation with logprobs; `params` go into the sampling parameters."""
        body = _generation(token_ids, max_tokens, params)
        return self.post("/inference/v1/generate", body, timeout_s=timeout_s)

    def stream(self, token_ids: Sequence[int], max_tokens: int, **params: Any) -> Iterator[Any]:
        """The events of a streamed generation: decoded JSON, and `[DONE]` as that text."""
        body = {**_generation(token_ids, max_tokens, params), "stream": True}
        with contextlib.closing(self._connection(ANSWER_S)) as connection:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/inference/v1/generate", json.dumps(body), headers)
            response = connection.getresponse()
            assert response.status == 200, response.read()
            for raw in response:
                if raw.startswith(b"data: "):
                    text = raw[6:].strip().decode()
                    yield text if text == "[DONE]" else json.loads(text)

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)


def _generation(token_ids: Sequence[int], max_tokens: int, params: Mapping[str, Any]) -> dict[str, Any]:
    sampling = {"max_tokens": max_tokens, "temperature": 0.0, "logprobs": 0, **params}
    return {"token_ids": list(token_ids), "sampling_params": sampling}
