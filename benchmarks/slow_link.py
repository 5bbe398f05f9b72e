"""A link with a delay: what comes in goes out to a server, both ways, so many seconds later and in the same order.

python -m benchmarks.slow_link 8000 0.05    # prints the port that leads to port 8000 of this machine
"""

from __future__ import annotations

import asyncio
import sys


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """Pass on what is read, each piece after the delay; the link itself has no limit of bytes a second."""
    loop, pieces = asyncio.get_running_loop(), asyncio.Queue[tuple[float, bytes]]()

    async def read() -> None:
        while data := await reader.read(1 << 16):
            pieces.put_nowait((loop.time() + delay_s, data))
        pieces.put_nowait((loop.time() + delay_s, b""))

    reading = asyncio.create_task(read())
    try:
        while True:
            due_s, data = await pieces.get()
            await asyncio.sleep(due_s - loop.time())
            if not data:
                return
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        return
    finally:
        reading.cancel()
        writer.close()


async def serve(port: int, delay_s: float) -> None:
    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, there_writer, delay_s), pump(there_reader, writer, delay_s))

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2])))
