"""A process of its own at the other end of a TCP transport, to be killed, stopped and started again.

    peer.py serve PORT NUM_BLOCKS NUM_FINISHED     prints its address
    peer.py pull ADDRESS NUM_BLOCKS                prints "started", then how the pull ended

Prefill never gets beyond NUM_FINISHED blocks. The server ends with its standard input.
"""

from __future__ import annotations

import asyncio
import sys

from kvtransfer.errors import TransferError
from kvtransfer.tcp import TcpTransport
from tests.kvtransfer.makers import IMPATIENT, Offers, make_blocks, make_destination, make_request

BLOCK_NBYTES = 256 << 10  # enough of them don't fit into the kernel's buffers


async def serve(port: str, num_blocks: str, num_finished: str) -> None:
    transport, offers = TcpTransport(IMPATIENT), Offers()
    offers.offer(make_blocks(int(num_blocks), BLOCK_NBYTES), num_finished=int(num_finished))
    print(await transport.listen("127.0.0.1", int(port), offers), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await transport.close()


async def pull(address: str, num_blocks: str) -> None:
    transport = TcpTransport(IMPATIENT)
    running = transport.pull(address, make_request(), make_destination(int(num_blocks), BLOCK_NBYTES))
    print("started", flush=True)
    try:
        await running.result()
        print("done", flush=True)
    except TransferError as error:
        print(error.label, flush=True)
    await transport.close()


if __name__ == "__main__":
    asyncio.run({"serve": serve, "pull": pull}[sys.argv[1]](*sys.argv[2:]))
