"""Texts in, texts out: `/v1/completions` and `/v1/chat/completions` with replay under them.

An answer's first attempt is the engine's own, byte for byte; the gateway adds only that it is streamed and
that token ids come with the text. What an engine's death interrupts goes on by token ids alone: the next
engine says what the request means in tokens and parameters (`/render`), generates on from prompt and kept
tokens (`/inference/v1/generate` in text mode), and spells the tokens around the seam (`/derender`), because
a stream that begins in the middle of a character cannot. Nothing is ever encoded again.

Pure parts: `asked` (what a call asks for), `words` (the two endpoints' JSON), `script` (the ledger of a text
that can go on) and `relay` (of one that cannot). Around them: `flight`, `seam`, `speech`, `answer`.
"""
