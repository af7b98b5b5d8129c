"""SkyRL with external engines: its own client, its data plane over the gateway, its weights' group."""

import importlib.util
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import anyio
import pytest

from relight.agents.stub.tokens import reference, weights_digest
from relight.events.bus.embedded import Embedded
from relight.events.decisions import RouteAdded
from tests.integration_rig import gateway, running, stub
from tests.node_support import E0, kill, node_file, role
from tests.orchestrator_support import until
from tests.weights_rig import job

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:client.loop property is deprecated:DeprecationWarning"),
    pytest.mark.skipif(importlib.util.find_spec("skyrl") is None, reason="SkyRL is not installed"),
]

TOKENS = 60
PROMPTS = [[5, 6, 7], [8, 9, 10]]


@pytest.fixture
def client_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`RemoteInferenceClient`. Its package's `__init__`, which brings a server, is passed by."""
    spec = importlib.util.find_spec("skyrl")
    assert spec is not None and spec.submodule_search_locations
    package = ModuleType("skyrl.backends")
    package.__path__ = [f"{spec.submodule_search_locations[0]}/backends"]
    monkeypatch.setitem(sys.modules, "skyrl.backends", package)
    module = import_module("skyrl.backends.skyrl_train.inference_servers.remote_inference_client")
    return module.RemoteInferenceClient


class Words:
    """A tokenizer at hand, as SkyRL's trainer gives its client one."""

    @staticmethod
    def batch_decode(answers: list[list[int]], **_: Any) -> list[str]:
        return [" ".join(map(str, token_ids)) for token_ids in answers]


async def test_its_rollouts_come_whole_over_a_death_and_its_group_does_not_hold_the_replacement(
    server: Embedded, tmp_path: Path, stub_model: Path, client_class: Any, free_port: int
) -> None:
    knobs = ("--token-interval-ms", "10", "--served-model-name", "m")
    file = node_file(tmp_path / "state", stub(stub_model, *knobs, port=free_port))
    async with job(server.url, file) as watch, gateway(server.url) as address:
        engines = [f"http://127.0.0.1:{free_port}"]
        client = client_class(
            proxy_url=address, server_urls=engines, data_parallel_size=1, model_name="m", tokenizer=Words()
        )
        async with client:
            group = {"backend": "stub"}
            await client._call_all_servers("/init_weight_transfer_engine", {"init_info": group})
            await client.pause()
            await client.resume()

            told: list[Any] = []
            async with anyio.create_task_group() as tasks:

                async def generate() -> None:
                    sampling = {"max_tokens": TOKENS, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}
                    batch = {"prompt_token_ids": PROMPTS, "sampling_params": sampling}
                    told.append(await client.generate(batch | {"session_ids": ["a", "b"]}))

                tasks.start_soon(generate)
                await until(lambda: running(engines[0]))
                kill(role(file, "core"))
            digest = weights_digest(stub_model)
            expected = [reference(digest, prompt, TOKENS) for prompt in PROMPTS]
            assert told[0]["response_ids"] == [ids for ids, _ in expected]
            assert told[0]["response_logprobs"] == [logprobs for _, logprobs in expected]
            assert told[0]["stop_reasons"] == ["length", "length"]

            # The replacement stands at the same address, so that the control plane reaches it; the group was
            # made once, before it was started, and an update over it is refused aloud.
            again = await watch.routed(E0, 2)
            assert again.address.endswith(f":{free_port}")
            assert len(watch.all(RouteAdded)) == 2
            await client.pause()
            with pytest.raises(aiohttp.ClientResponseError) as refused:
                await client.update_named_weights({"names": [], "dtype_names": [], "shapes": []})
            assert refused.value.status >= 400
            await client.resume()
