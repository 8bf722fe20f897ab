"""How likely a text is: perplexity, log probabilities of its tokens, and the likeliest of some answers."""

from __future__ import annotations

import argparse

import perdure

TEXTS = ("The sky is blue.", "The sky is loud.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a .gguf file or a name (default: the default model)")
    options = parser.parse_args()
    with perdure.open(options.model, n_ctx=256) as runtime:
        for text in TEXTS:
            print(f"{runtime.score(text).perplexity:10.2f}  {text}")
        for entry in runtime.score(TEXTS[0]).prompt_logprobs or ():
            if entry is not None:
                print(f"  {entry.logprob:7.2f}  {runtime.model.detokenize([entry.token])!r}")
        for choice in runtime.choose("Is the sky blue? Answer:", [" yes", " no", " perhaps"], by="token"):
            print(f"{choice.probability:7.3f} {choice.option}")


if __name__ == "__main__":
    main()
