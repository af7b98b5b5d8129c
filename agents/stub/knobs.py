"""Every fault the stub can play, as one frozen struct: flags at the start, `POST /stub/knobs` at run time.

A knob that needs a fresh process (start and stray ones) can be posted too and then changes nothing.
"""

from typing import Any, Literal

import msgspec

StreamFault = Literal["none", "error", "error_done", "eof", "cut", "hang", "abort", "empty", "silent"]
Transfer = Literal["load", "nothing", "refuse", "fail", "finish", "hang"]
Reload = Literal["load", "nothing", "half", "base", "spoil", "fail", "poison", "hang"]
PrefixCache = Literal["off", "on", "sticky"]


class Knobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Faults; all are off by default. A count of tokens starts when the knob is set."""

    freeze_after_tokens: int | None = None
    """The core stops itself (SIGSTOP) after that many tokens of all requests together; 0 is at once."""
    exit_after_tokens: int | None = None
    """The core exits with code 0 after that many tokens; the server then follows with code 0."""
    die_after_s: float | None = None
    """The core kills itself (SIGKILL) that many seconds after it is ready. Start only."""
    ignore_sigterm: bool = False
    """Server, core and worker ignore SIGTERM."""
    slow_start_s: float = 0.0
    """Seconds the core takes longer to become ready; nobody listens meanwhile. Start only."""
    start_fails: str = ""
    """The start ends with this sentence on stderr and exit code 1, before anybody listens. Start only."""
    front_exits_in_start: bool = False
    """The server exits with code 1 while starting; core and worker live on. Start only."""
    hold_port: bool = False
    """A child in a session of its own keeps the listening port after the server's death. Start only."""
    strays: int = 0
    """So many children of the worker daemonise (own session, no parent) and ignore SIGTERM. Start only."""
    stray_s: float = 120.0
    """Seconds after which strays and port holders end by themselves, so that no test run leaves any."""
    orphan_s: float = 300.0
    """Seconds after which a core whose server is gone ends by itself."""
    outlives_head: bool = False
    """A further part lives on when its head is gone, and ends after `orphan_s` only. Start only."""
    print_mib: float = 0.0
    """MiB written to stdout once ready, by the server itself: an undrained pipe blocks it. Start only."""
    shm_line_s: float = 0.0
    """Every so many seconds vLLM's harmless shared-memory line is printed; 0 is never. Start only."""

    probe_delay_s: float = 0.0
    """/health, /is_paused and check_health answer so much later while tokens go on."""
    no_metrics: bool = False
    """/metrics answers 404, as behind a proxy that does not know it."""
    compile_s: float = 0.0
    """Once it is set, a compiler runs below the core for so many seconds, and the core answers nothing."""
    dies_at_wake_up: bool = False
    """/wake_up answers 200 and the core ends, as one does that finds no room for its weights."""
    generate_status: int = 0
    """Status with which /inference/v1/generate refuses (500, 503, ...); 0 is none."""
    retry_after_s: int | None = None
    """Seconds in the Retry-After header of such a refusal; None leaves the header out."""

    stream_fault: StreamFault = "none"
    """How a generation breaks: `error` frame without [DONE], `error_done` frame and [DONE], `eof` a clean end
    without finish, `cut` a reset connection, `hang` no further byte, `abort` finish reason abort, `empty` 200
    without a body, `silent` not even headers. Unstreamed, the error ones are a 500 and `eof` is `empty`."""
    stream_fault_after: int = 0
    """Tokens of the generation that still arrive before `stream_fault`; `empty` and `silent` know none."""
    stream_fault_skip: int = 0
    """How many generations pass unharmed after `stream_fault` was set."""
    stream_fault_times: int = 0
    """How many generations it strikes then; 0 is every one."""
    drop_token: int | None = None
    """The output token with this index (and its logprob) is left out of the answer."""
    no_token_ids: bool = False
    """Text answers carry no token ids, as those of engines that know no `return_token_ids`."""
    short_logprobs: bool = False
    """Each chunk carries one logprob less than tokens."""
    logprob_shift: float = 0.0
    """Added to each logprob."""
    logprob_shift_after_resume: float = 0.0
    """Added to each logprob of tokens made after the next POST /resume."""

    reload: Reload = "load"
    """reload_weights: `nothing` answers 200 and loads nothing, `half` 200 and leaves every second tensor as
    it was, `base` 200 and loads the folder it was started on, `spoil` 200 and computes with something else
    while its checksums are right, `fail` answers 500 and changes nothing, `poison` answers 500 and the next
    request kills the core, `hang` never answers."""
    transfer: Transfer = "load"
    """A pushed update: `nothing` answers 200 and loads nothing, `refuse` answers 500 to its start, `fail` to
    the weights themselves, `finish` to its end; after the last two the next request kills the core, as
    tensors without bytes do. `hang` takes no weights and never answers."""
    reload_s: float = 0.0
    """Seconds a reload takes; the core answers nothing meanwhile, as vLLM's does not."""
    lying_version: str = ""
    """The label that /weight_info and the version spans tell, whatever is loaded or set; empty: the truth."""
    empty_checksums: bool = False
    """/weight_checker answers the hash of nothing for each tensor, as packed layers do on the CPU build."""
    prefix_cache: PrefixCache = "off"
    """`on`: a prompt whose first 16 tokens were seen is answered with the weights of that time until the
    cache is reset. `sticky`: the same, and the reset says success and resets nothing."""


def merged(knobs: Knobs, changes: dict[str, Any]) -> Knobs:
    """`knobs` with some fields changed; raises `msgspec.ValidationError` naming the path that is wrong."""
    return msgspec.convert({**msgspec.structs.asdict(knobs), **changes}, type=Knobs)
