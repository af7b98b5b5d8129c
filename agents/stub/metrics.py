"""/metrics in Prometheus' text format, from what the core told last: counters freeze when it does."""

from relight.agents.stub.engine import Engine


def exposition(engine: Engine) -> str:
    """The counters that relight reads, under vLLM's names and labels."""
    stats = engine.stats
    labels = f'engine="0",model_name="{engine.settings.served_model_name}"'
    rows: list[str] = []
    for name, kind, series in (
        ("vllm:num_requests_running", "gauge", {"": stats.running}),
        ("vllm:num_requests_waiting", "gauge", {"": stats.waiting}),
        ("vllm:kv_cache_usage_perc", "gauge", {"": stats.running / engine.settings.max_num_seqs}),
        ("vllm:prompt_tokens", "counter", {"_total": engine.prompted}),
        ("vllm:prefix_cache_hits", "counter", {"_total": stats.hits}),
        ("vllm:generation_tokens", "counter", {"_total": stats.generated}),
        (
            "vllm:iteration_tokens_total",
            "histogram",
            {"_count": stats.iterations, "_sum": stats.generated + engine.prompted},
        ),
    ):
        rows.append(f"# TYPE {name} {kind}")
        rows += [f"{name}{suffix}{{{labels}}} {float(value)}" for suffix, value in series.items()]
    rows.append("# TYPE vllm:engine_sleep_state gauge")
    for state, holds in (
        ("awake", not stats.asleep),
        ("weights_offloaded", stats.asleep),
        ("discard_all", False),
    ):
        rows.append(f'vllm:engine_sleep_state{{{labels},sleep_state="{state}"}} {float(holds)}')
    rows.append("# TYPE vllm:request_success counter")
    for reason in ("stop", "length", "abort", "error", "repetition"):
        count = float(engine.finished.get(reason, 0))
        rows.append(f'vllm:request_success_total{{finished_reason="{reason}",{labels}}} {count}')
    return "\n".join(rows) + "\n"
