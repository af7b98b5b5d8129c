"""An engine's place, which sends each stream a token every so often and writes on it when it was sent.

`python -m benchmarks.replay.pacer INTERVAL_MS TOKENS`; its first line is its port. The moment stands in
`system_fingerprint`, in nanoseconds of the machine's monotonic clock, which all of its processes share.
"""

import sys
import time

import anyio
import msgspec
from aiohttp import web


async def completions(request: web.Request, *, interval_s: float, tokens: int) -> web.StreamResponse:
    """`/v1/completions`, streamed, in vLLM's shape."""
    response = web.StreamResponse()
    response.content_type = "text/event-stream"
    await response.prepare(request)
    begun = anyio.current_time()
    for number in range(tokens):
        await anyio.sleep_until(begun + number * interval_s)
        choice = {
            "index": 0,
            "text": "ab",
            "logprobs": None,
            "finish_reason": "length" if number == tokens - 1 else None,
            "stop_reason": None,
            "prompt_token_ids": None if number else [1, 2, 3],
            "token_ids": [number],
        }
        chunk = {"id": "cmpl-x", "object": "text_completion", "created": 0, "model": "m", "choices": [choice]}
        chunk["system_fingerprint"] = str(time.monotonic_ns())
        await response.write(b"data: " + msgspec.json.encode(chunk) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


async def main(interval_ms: float, tokens: int) -> None:
    async def paced(request: web.Request) -> web.StreamResponse:
        return await completions(request, interval_s=interval_ms / 1000, tokens=tokens)

    app = web.Application()
    app.router.add_post("/v1/completions", paced)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main, float(sys.argv[1]), int(sys.argv[2]))
