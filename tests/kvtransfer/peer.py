"""A process of its own at the other end of a TCP transport, to be killed, stopped and started again.

    peer.py serve PORT NUM_BLOCKS NUM_FINISHED     prints its address
    peer.py pull ADDRESS NUM_BLOCKS                prints "started", then how the pull ended

Prefill never gets beyond NUM_FINISHED blocks. The server ends with its standard input.
"""

from __future__ import annotations

import asyncio
import sys

from kvtransfer.errors import TransferError
from kvtransfer.messages import TransferDeadlines
from kvtransfer.tcp import TcpTransport
from tests.kvtransfer.makers import Offers, make_blocks, make_destination, make_request

DEADLINES = TransferDeadlines(open_s=1.0, peer_timeout_s=0.5, working_interval_s=0.1)
BLOCK_NBYTES = 256 << 10  # enough of them don't fit into the kernel's buffers


async def serve(port: int, num_blocks: int, num_finished: int) -> None:
    transport, offers = TcpTransport(DEADLINES), Offers()
    offers.offer(make_blocks(num_blocks, BLOCK_NBYTES), num_finished=num_finished)
    print(await transport.listen("127.0.0.1", port, offers), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await transport.close()


async def pull(address: str, num_blocks: int) -> None:
    transport = TcpTransport(DEADLINES)
    running = transport.pull(address, make_request(), make_destination(num_blocks, BLOCK_NBYTES))
    print("started", flush=True)
    try:
        await running.result()
        print("done", flush=True)
    except TransferError as error:
        print(error.label, flush=True)
    await transport.close()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", port, num_blocks, num_finished]:
            asyncio.run(serve(int(port), int(num_blocks), int(num_finished)))
        case ["pull", address, num_blocks]:
            asyncio.run(pull(address, int(num_blocks)))
        case _:
            sys.exit(__doc__)
