"""Serve a GGUF file with xllamacpp on a free port of this machine: prints the address, ends when stdin closes."""

from __future__ import annotations

import sys


def main(path: str) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.port = 0
    params.n_ctx, params.n_parallel, params.warmup = 2048, 4, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    print(f"listening {server.listening_address}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1])
