"""SkyRL's server, and an older official client that it understands, for `benchmarks.service_peers`.

Run by a Python that has `skyrl[tinker,jax]` 0.3.0, with the folder of a client from before protobuf (`clients.lock`)
first on its path. It is told what to do on standard input, a word a line: `step` trains on the examples, `sample` draws
tokens. It answers each with a line of JSON: seconds, and tokens that came.

The server starts its engine by `uv run`, and pydantic refuses one of its types before Python 3.12: both are mended here
(`serve` and `engine` are the processes), and nothing else.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import typing
from typing import Any

START_S = 280.0


def serve() -> None:
    """Be the server: its module, with the engine started by this Python."""
    from skyrl.tinker import api
    from skyrl.tinker.config import EngineConfig, add_model, config_to_argv

    def engine(_: Any, config: Any) -> list[str]:
        return [sys.executable, __file__, "engine", *config_to_argv(config)]

    api._build_uv_run_cmd_engine = engine
    import argparse

    import uvicorn

    parser = argparse.ArgumentParser()
    add_model(parser, EngineConfig)
    parser.add_argument("--port", type=int)
    given = vars(parser.parse_args())
    port = given.pop("port")
    api.app.state.engine_config = EngineConfig.model_validate(given)
    uvicorn.run(api.app, host="127.0.0.1", port=port, log_level="warning")


def ask(url: str, given: dict[str, Any]) -> None:
    """Train and draw as standard input says."""
    os.environ["TINKER_TELEMETRY"] = "0"
    import tinker

    client = tinker.ServiceClient(base_url=url, api_key="tml-of-a-benchmark")
    trained = client.create_lora_training_client(given["model"], rank=given["rank"], seed=0)
    data = [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(text[:-1]),
            loss_fn_inputs={
                "target_tokens": tinker.TensorData(data=text[1:], dtype="int64", shape=[len(text) - 1]),
                "weights": tinker.TensorData(data=[1.0] * (len(text) - 1), dtype="float32", shape=[len(text) - 1]),
            },
        )
        for text in given["texts"]
    ]
    prompt = tinker.ModelInput.from_ints(given["texts"][0])
    params = tinker.SamplingParams(max_tokens=given["tokens"], stop=[], seed=0, temperature=1.0)
    sampler = trained.save_weights_and_get_sampling_client()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        started_s, count = time.perf_counter(), 0
        if line.strip() == "step":
            trained.forward_backward(data, "cross_entropy")
            trained.optim_step(tinker.AdamParams(learning_rate=1e-4)).result(timeout=600)
        else:
            found = sampler.sample(prompt, 1, params).result(timeout=600)
            count = sum(len(one.tokens) for one in found.sequences)
        print(json.dumps([time.perf_counter() - started_s, count]), flush=True)


def main() -> None:
    import urllib.request

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and end the server, below
    given = json.loads(sys.stdin.readline())
    url = f"http://127.0.0.1:{given['port']}"
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "base-model": given["model"], "backend": "jax", "port": str(given["port"]),
            "backend-config": json.dumps({"max_lora_adapters": 2, "max_lora_rank": given["rank"]}),
            "checkpoints-base": f"{folder}/checkpoints", "database-url": f"sqlite:///{folder}/tinker.db",
        }  # fmt: skip
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        server = subprocess.Popen(
            [sys.executable, __file__, "serve", *words], stdin=subprocess.DEVNULL, stdout=sys.stderr,
            start_new_session=True,
        )  # fmt: skip
        try:
            deadline_s = time.monotonic() + START_S
            while True:
                try:
                    urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=5).close()
                    break
                except OSError:
                    if server.poll() is not None or time.monotonic() > deadline_s:
                        raise
                    time.sleep(0.5)
            ask(url, given)
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(timeout=60)


if __name__ == "__main__":
    if sys.version_info < (3, 12):
        import typing_extensions

        typing.TypedDict = typing_extensions.TypedDict  # type: ignore[misc,assignment]
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    kind = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if kind == "serve":
        serve()
    elif kind == "engine":
        runpy.run_module("skyrl.tinker.engine", run_name="__main__")
    else:
        main()
