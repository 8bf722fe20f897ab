"""Text as it comes: in a loop, and several replies at once with asyncio."""

from __future__ import annotations

import argparse
import asyncio

import perdure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a .gguf file or a name (default: the default model)")
    options = parser.parse_args()
    with perdure.open(options.model, n_ctx=512, slots=3) as runtime:
        for delta in runtime.stream("The best thing about the sea is", max_tokens=40, stop=["\n"]):
            print(delta.text, end="", flush=True)
        print()
        asyncio.run(together(runtime))


async def together(runtime: perdure.Runtime) -> None:
    """Three replies share the engine's steps; each prints a piece when it has one."""

    async def follow(colour: str) -> str:
        text = ""
        async for delta in runtime.astream(f"{colour} is the colour of", max_tokens=12):
            text += delta.text
            print(f"[{colour}] {delta.text!r}")
        return text

    for colour, text in zip(
        ("Red", "Green", "Blue"), await asyncio.gather(*map(follow, ("Red", "Green", "Blue"))), strict=True
    ):
        print(f"{colour} is the colour of{text}")


if __name__ == "__main__":
    main()
