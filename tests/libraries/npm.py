"""A small npm in Python: it knows `pack` and `config get cache`, and asks the registry it is told to."""

import json
import os
import pathlib
import sys
import urllib.error
import urllib.parse
import urllib.request


def get(url: str) -> bytes:
    with urllib.request.urlopen(url) as response:
        body: bytes = response.read()
        return body


def main(arguments: list[str]) -> None:
    cache = os.environ["npm_config_cache"]  # noqa: SIM112
    if arguments[:3] == ["config", "get", "cache"]:
        print(cache)
        return
    assert arguments[0] == "pack", arguments
    name, _, version = arguments[1].rpartition("@")
    [folder] = [each.partition("=")[2] for each in arguments if each.startswith("--pack-destination=")]
    registry = os.environ["npm_config_registry"]  # noqa: SIM112
    try:
        listing = json.loads(get(f"{registry}/{urllib.parse.quote(name, safe='@')}"))
        archive = listing["versions"][version]["dist"]["tarball"]
        temporary = pathlib.Path(cache, "_cacache", "tmp")
        temporary.mkdir(parents=True, exist_ok=True)
        part = temporary / str(os.getpid())
        with urllib.request.urlopen(archive) as response, part.open("wb") as file:
            while chunk := response.read1(1 << 16):
                file.write(chunk)
                file.flush()
        part.rename(pathlib.Path(folder, archive.rpartition("/")[2]))
    except urllib.error.URLError as error:
        sys.exit(f"npm error code E404\nnpm error 404 {error}")


main([each for each in sys.argv[1:] if not each.endswith(".js")])
