"""Many prompts at once: queue them all; the engine serves as many at a time as it has slots."""

from __future__ import annotations

import argparse

import perdure

CITIES = ("Bergen", "Porto", "Lyon", "Turin", "Ghent", "Aarhus", "Kraków", "Seville")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a .gguf file or a name (default: the default model)")
    options = parser.parse_args()
    # The beginning that all prompts share is computed once.
    shared = "You write one short sentence about a city, without any introduction.\n\nThe city of "
    with perdure.open(options.model, n_ctx=512, slots=4) as runtime:
        jobs = {city: runtime.submit(f"{shared}{city}", max_tokens=24, stop=["\n"]) for city in CITIES}
        for city, job in jobs.items():
            reply = job.reply()
            print(f"{city}{reply.text}  ({reply.usage.cached_tokens} of {reply.usage.prompt_tokens} reused)")


if __name__ == "__main__":
    main()
