"""Hatchery's server and its own client in one process, for `benchmarks.service_peers`; run by a Python that has it.

It is told what to do on standard input, a word a line: `step` trains on the examples, `sample` draws tokens. It answers
each with a line of JSON: seconds, and tokens that came. Its local server trains on a GPU alone, so that the parts of it
are put together here with the worker on the CPU.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from typing import Any


def serve(model: str, port: int) -> None:
    import uvicorn
    from hatchery.core.backends.auth.api_key import APIKeyAuthProvider
    from hatchery.core.backends.compute.local import LocalComputeBackend
    from hatchery.core.backends.metadata.memory import InMemoryMetadataStore
    from hatchery.core.backends.metrics.log import LogMetrics
    from hatchery.core.backends.object_store.memory import InMemoryObjectStore
    from hatchery.core.backends.queue.memory import InMemoryJobQueue
    from hatchery.core.config import Config
    from hatchery.core.gateway import create_app, set_config
    from hatchery.core.worker import GPUWorker

    auth = APIKeyAuthProvider()
    auth.add_key("dev", user_id="dev", tier="enterprise", max_concurrent_sessions=10, max_rank=256)
    config = Config(
        auth=auth, metadata=InMemoryMetadataStore(), objects=InMemoryObjectStore(), queue=InMemoryJobQueue(),
        compute=LocalComputeBackend(), metrics=LogMetrics(),
    )  # fmt: skip

    async def work() -> None:
        set_config(config)
        await config.metadata.initialize()
        await config.queue.initialize()
        worker = GPUWorker(worker_id="one", base_model_name=model, config=config, device="cpu")
        await worker.register()

        async def loop() -> None:
            while True:
                job = await config.queue.dequeue(worker_id="one", model_filter=model, visibility_timeout=300)
                if job is None:
                    await asyncio.sleep(0.02)
                else:
                    await worker._process_one(job)

        app = create_app(config=config)
        server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", lifespan="off"))
        await asyncio.gather(server.serve(), loop())

    asyncio.run(work())


def main() -> None:
    given = json.loads(sys.stdin.readline())
    model, port = given["model"], given["port"]
    threading.Thread(target=serve, args=(model, port), daemon=True).start()
    from hatchery.core.client import HatcheryClient

    client: Any = HatcheryClient(base_url=f"http://127.0.0.1:{port}", token="dev")
    trained: Any = None
    for _ in range(600):
        try:
            trained = client.create_lora_training_client(model, rank=given["rank"], train_unembed=True)
            break
        except Exception as error:  # noqa: BLE001 - it is not up yet
            last = error
            time.sleep(0.5)
    if trained is None:
        raise last
    data = [
        {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": text[:-1]}]},
            "loss_fn_inputs": {"target_tokens": {"data": text[1:], "shape": [len(text) - 1], "dtype": "int64"}},
        }
        for text in given["texts"]
    ]
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        started_s, count = time.perf_counter(), 0
        if line.strip() == "step":
            trained.forward_backward(data, "cross_entropy")
            trained.optim_step(learning_rate=1e-4).result(timeout=600)
        else:
            found = trained.sample(given["texts"][0], max_tokens=given["tokens"]).result(timeout=600)
            count = sum(len(one["tokens"]) for one in found["sequences"])
        print(json.dumps([time.perf_counter() - started_s, count]), flush=True)


if __name__ == "__main__":
    main()
