"""An MCP server that works and breaks, written with the official SDK: `python mcp_server.py [stdio | http]`.

Over HTTP it prints its port first.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import Any

import anyio
import uvicorn
from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("shop", log_level="ERROR")
PRICES = {"pear": 3, "apple": 2}
stock = {"pear": 1, "apple": 0}


@server.tool()
def price(item: str) -> int:
    """Return the price of an item.

    Args:
        item: what to buy
    """
    return PRICES[item]


@server.tool()
def buy(item: str) -> str:
    """Take an item from the stock."""
    if not stock[item]:
        raise ValueError(f"no {item} left")
    stock[item] -= 1
    return "bought"


@server.tool()
def restock(seed: int, pears: int = 1) -> str:
    stock["pear"] = pears
    return "done"


@server.tool()
def die() -> str:
    os._exit(3)


@server.tool()
async def hang() -> str:
    await anyio.sleep_forever()
    return ""


@server.tool()
def block() -> str:
    time.sleep(3600)
    return ""


@server.tool()
def picture() -> Image:
    return Image(data=b"GIF89a", format="gif")


@server.tool()
def shout(size: int) -> str:
    return "a" * size


@server.tool()
def scribble() -> str:
    """Write what is no protocol on the standard output."""
    os.write(1, b"warning: low disk\n")
    return "ok"


@server.tool()
def drop(name: str) -> str:
    """Remove a tool."""
    server.remove_tool(name)
    return "dropped"


@server.tool()
def grow(count: int) -> str:
    """Add many tools."""
    tools = server._tool_manager._tools  # pyright: ignore[reportPrivateUsage] - adding 5,000 in the usual way takes 40 s
    tools |= {name: tools["price"].model_copy(update={"name": name}) for name in (f"tool_{n}" for n in range(count))}
    return "grown"


baskets: dict[str, list[str]] = {}


@server.tool()
def open_basket() -> dict[str, str]:
    """Open a basket, as a server without sessions does: the handle says whose it is."""
    basket_id = f"basket-{len(baskets)}"
    baskets[basket_id] = []
    return {"basket_id": basket_id}


@server.tool()
def put(item: str, basket_id: str) -> str:
    """Put an item into the basket."""
    baskets.setdefault(basket_id, []).append(item)
    return ", ".join(baskets[basket_id])


@server.tool()
def close_basket(basket_id: str) -> str:
    """Throw the basket away."""
    del baskets[basket_id]
    return "closed"


@server.tool()
def count_baskets() -> int:
    return len(baskets)


@server.resource("shop://rules")
def rules() -> str:
    return "One pear each."


@server.resource("shop://logo", mime_type="image/gif")
def logo() -> bytes:
    return b"GIF89a"


def main() -> None:
    if sys.argv[1:] != ["http"]:
        if sys.argv[1:2] == ["grown"]:
            grow(int(sys.argv[2]))
        server.run("stdio")
        return
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    app: Any = server.streamable_http_app()
    print(listener.getsockname()[1], flush=True)  # noqa: T201 - the test reads it
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])


if __name__ == "__main__":
    main()
